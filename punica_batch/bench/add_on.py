"""SGMV alone: fused groups whose slots hold random adapters, and what adding them must cost at the least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from punica_batch_kernels.sgmv import AddLora
from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights
from torch import Tensor

from punica_batch.bench.popularity import Popularity, segment_lengths

Shape = tuple[int, tuple[int, ...]]

COLD_BYTES = 256 << 20  # five times what an H200's L2 cache holds
MOST_PRODUCTS = 1024  # in a graph: each is launched from the host, too, before there is one


@dataclass(slots=True)
class AddOn:
    """``layers`` copies of the fused groups ``shapes``, each with weights of its own in every slot. Slot s holds an
    adapter of rank ``ranks[s]`` in all of a group's slices.

    ``max_rank``: what kernels prepare for; the largest rank by default. ``cold_bytes``: of the weights that ``turns``
    are to read, so that none is in a cache when it is read again; nothing on a CPU.
    """

    shapes: Sequence[Shape]
    layers: int
    ranks: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    max_rank: int | None = None
    cold_bytes: int | None = None
    groups: list[LoraGroup] = field(init=False)  # layer by layer, as ``shapes`` orders them

    def __post_init__(self) -> None:
        self.groups = [
            LoraGroup(into, (0, *accumulate(widths)), [None] * len(self.ranks))
            for _ in range(self.layers)
            for into, widths in self.shapes
        ]
        if self.cold_bytes is None:
            self.cold_bytes = COLD_BYTES if self.device.type == "cuda" else 0
        fill(self.groups, self.ranks, self.dtype, self.device)
        if self.device.type == "cuda":
            SlotTables(self.groups, self.max_rank or max(self.ranks), self.dtype, self.device)

    def operands(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """x [rows, in] and y [rows, out] of each group; all layers use the same, as a step's activations stay in the
        cache."""
        pairs = []
        for into, widths in self.shapes:
            x = torch.randn(rows, into, device=self.device).to(self.dtype)
            pairs.append((x, torch.zeros(rows, sum(widths), dtype=self.dtype, device=self.device)))
        return pairs

    def turns(self, kind: Popularity, rows: int) -> tuple[list[Segments], list[int]]:
        """Segments of ``rows`` rows over the first slots, over the next ones of the same ranks, and so on: as many as
        read ``cold_bytes`` in all layers, as there are slots for, and as a graph of ``MOST_PRODUCTS`` holds; and the
        rows of each adapter, which are the same in all."""
        lengths = segment_lengths(kind, rows)
        period = next(p for p in range(1, len(self.ranks) + 1) if self._repeats(p))
        stride = period * -(-len(lengths) // period)
        room = 1 + (len(self.ranks) - len(lengths)) // stride
        wanted = math.ceil((self.cold_bytes or 0) / (self.layers * self.moved(lengths, activations=False)))
        count = max(1, min(wanted, room, MOST_PRODUCTS // len(self.groups)))
        return [_segments(lengths, stride * turn, self.device) for turn in range(count)], lengths

    def _repeats(self, period: int) -> bool:
        return all(rank == self.ranks[slot % period] for slot, rank in enumerate(self.ranks))

    def step(self, add_lora: AddLora, turns: Sequence[Segments], *, unsplit: bool = False) -> Callable[[], None]:
        """Adds all layers' adapters, once a turn; each has the same number of rows. ``unsplit``: v is one buffer
        without room for partial sums, so K is not split."""
        rows = turns[0].seg_indptr[-1]
        operands = self.operands(rows)
        buffer = None
        if unsplit:
            columns = max(len(widths) for _, widths in self.shapes) * (self.max_rank or max(self.ranks))
            buffer = torch.empty(rows, columns, dtype=torch.float32, device=self.device)

        def run() -> None:
            for segments in turns:
                for i, group in enumerate(self.groups):
                    x, y = operands[i % len(operands)]
                    add_lora(y, x, group, segments, buffer)

        return run

    def flop(self, lengths: Sequence[int]) -> float:
        """Operations of one layer: 2 a weight and row (Punica paper, section 4.3)."""
        return 2.0 * sum(rows * self._elements(self.ranks[slot]) for slot, rows in enumerate(lengths))

    def moved(self, lengths: Sequence[int], *, activations: bool = True) -> float:
        """Bytes of one layer: each adapter's weights once, x read, y read and written (Punica paper, section 4.3)."""
        size = self.dtype.itemsize
        weights = sum(self._elements(self.ranks[slot]) for slot, _ in enumerate(lengths))
        columns = sum(into + 2 * sum(widths) for into, widths in self.shapes) if activations else 0
        return float(size * (weights + columns * sum(lengths)))

    def _elements(self, rank: int) -> int:
        return rank * sum(into * len(widths) + sum(widths) for into, widths in self.shapes)


def fill(groups: Sequence[LoraGroup], ranks: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Random weights in every slot, each slot's in one packed buffer as the engine lays them out."""
    for slot, rank in enumerate(ranks):
        size = sum(rank * (group.in_features * len(group.out_widths) + group.out_offsets[-1]) for group in groups)
        flat = torch.empty(size, dtype=dtype, device=device).normal_(std=0.02)
        used = 0
        for group in groups:
            widths, matrices = group.out_widths, []
            for rows, columns in ((rank * len(widths), group.in_features), *((rank, width) for width in widths)):
                matrices.append(flat[used : used + rows * columns].view(rows, columns))
                used += rows * columns
            a, *b = matrices
            group.slots[slot] = SlotWeights(a, tuple(m.t() for m in b), (rank,) * len(b))


def segments_of(kind: Popularity | None, rows: int, device: torch.device) -> tuple[Segments, list[int]]:
    """A step's rows grouped by adapter, adapter i in slot i, and the rows of each; None: the base model's rows."""
    if kind is None:
        return Segments.build([0, rows], [-1], device), []
    lengths = segment_lengths(kind, rows)
    return _segments(lengths, 0, device), lengths


def _segments(lengths: Sequence[int], first: int, device: torch.device) -> Segments:
    return Segments.build([0, *accumulate(lengths)], list(range(first, first + len(lengths))), device)
