"""What the SGMV kernels are given, the same for every backend.

Semantics (Punica paper, section 4): rows ``x[seg_indptr[i] : seg_indptr[i + 1]]`` all belong to the adapter in slot
``lora_indices[i]`` (-1: the base model, nothing is added)::

    shrink   v[rows of i] = x[rows of i] @ A[slot].T          h_in -> r
    expand   y[rows of i, slice] += v[rows of i] @ B[slot].T  r -> h_out      (the LoRA scale is folded into B)

Projections that share x (Q/K/V; gate/up) are *slices* of one fused group: one shrink computes all their v side by
side, one expand adds all their y. A slice's rank is the adapter's own for that projection: 0 where it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from punica_batch_kernels.sgmv.tiles import RowTiles, build_tiles, take_all_rows

# Q, K and V: no more projections than these share an input.
MAX_SLICES = 3


@dataclass(frozen=True, slots=True)
class Segments:
    """A step's rows grouped by adapter; built once a step, used by every layer.

    ``seg_indptr`` [S + 1], rising from 0 to the number of rows; ``lora_indices`` [S], slot or -1: for backends that
    loop on the host. ``tiles`` are the work lists, one a kernel family, of those on CUDA devices (elsewhere: None).
    A step that replays a graph refills the tiles alone. ``all_rows``: they are tall tiles of all rows, base rows too,
    which the kernels of ``fused`` need.
    """

    seg_indptr: tuple[int, ...]
    lora_indices: tuple[int, ...]
    tiles: tuple[RowTiles, ...] | None = None
    all_rows: bool = False

    @classmethod
    def build(
        cls,
        seg_indptr: Sequence[int],
        lora_indices: Sequence[int],
        device: torch.device | str = "cpu",
        tiles: tuple[RowTiles, ...] | None = None,
        all_rows: bool = False,
    ) -> Segments:
        """``tiles`` (None: made and sent to a CUDA ``device`` here, with what ``all_rows`` is then): those of these
        segments.

        Raises ``ValueError`` unless starts rise from 0 and there is one slot a segment.
        """
        if len(seg_indptr) != len(lora_indices) + 1 or seg_indptr[0] != 0:
            raise ValueError("seg_indptr needs one more entry than lora_indices and must begin with 0")
        if any(b < a for a, b in pairwise(seg_indptr)):
            raise ValueError("seg_indptr must not fall")
        if tiles is None and torch.device(device).type == "cuda":
            all_rows = take_all_rows(seg_indptr, lora_indices)
            tiles = build_tiles(seg_indptr, lora_indices, device, all_rows=all_rows)
        return cls(tuple(seg_indptr), tuple(lora_indices), tiles, all_rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each segment."""
        return tuple(stop - start for start, stop in pairwise(self.seg_indptr))

    @property
    def has_lora(self) -> bool:
        return any(slot >= 0 for slot in self.lora_indices)


@dataclass(slots=True)
class SlotWeights:
    """One adapter's weights for one fused group of one layer, as views into the store's packed buffer.

    ``a`` [sum of ranks, h_in]: the slices' A stacked. ``b``: one [h_out of the slice, rank] a slice, scale folded in
    (None where the rank is 0). ``ranks``: one a slice. ``a_t``, ``b_t``: their transposed views, made once.
    ``descriptor``: a backend's own note of where they lie.
    """

    a: Tensor
    b: tuple[Tensor | None, ...]
    ranks: tuple[int, ...]
    a_t: Tensor = field(init=False, repr=False)
    b_t: tuple[Tensor | None, ...] = field(init=False, repr=False)
    descriptor: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self.a_t = self.a.t()
        self.b_t = tuple(None if b is None else b.t() for b in self.b)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """One group's slots as the device kernels find them; made and kept up to date by ``slot_table.SlotTables``.

    ``entries`` int64 [slots, 2 + 2 x MAX_SLICES], strided by row. No slice's rank exceeds ``max_rank``, now or later.
    """

    entries: Tensor
    max_rank: int
    dtype: torch.dtype


@dataclass(slots=True)
class LoraGroup:
    """One fused group (for example layer 3's Q/K/V) across all slots.

    ``out_offsets`` [slices + 1]: where each slice begins in y. ``slots[s]`` is None while slot s holds no adapter
    or its adapter does not touch this group. ``max_rank_sum`` bounds the width of v. ``table``: the slots' addresses,
    for backends that look them up on the device.
    """

    in_features: int
    out_offsets: tuple[int, ...]
    slots: list[SlotWeights | None] = field(default_factory=list)
    table: SlotTable | None = None

    @property
    def out_widths(self) -> list[int]:
        """One a slice."""
        return [stop - start for start, stop in pairwise(self.out_offsets)]

    @property
    def max_rank_sum(self) -> int:
        return max((s.a.shape[0] for s in self.slots if s is not None), default=0)
