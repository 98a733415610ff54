"""Measures kernel configurations on the GPU at hand: what fills the tables that ``triton_config`` looks up.

Shrink and expand are timed apart, each as one CUDA graph over many copies of a group whose weights are all distinct
and together exceed the L2 cache, as a whole step's do.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, RowTiles, plan_families, tile_bucket
from punica_batch_kernels.sgmv.triton_backend import empty_v, sgmv_expand, sgmv_shrink
from punica_batch_kernels.sgmv.triton_config import Config, ExpandConfig, ShrinkConfig, rule, table_key
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights

Shape = tuple[int, tuple[int, ...]]  # a group's in_features and its slices' widths

_COLD_BYTES = 256 << 20
_MAX_COPIES, _MAX_ADAPTERS, _REPLAYS = 128, 256, 5
# from so many rows on it is activations that count, and they exceed the cache by themselves
_MANY_ROWS, _MANY_ROWS_COPIES = 512, 8
# (bytes of a row of a block, warps, stages) of shrinks; (bytes of a block's columns, blocks, warps) of expands
_SHRINKS = {
    PER_ROW: [(512, 4, 1), (1024, 4, 1), (2048, 4, 1)],
    GROUPED: [(256, 4, 3), (512, 4, 3), (256, 4, 5)],
}
_PREFILL_SHRINKS = [(128, 4, 4), (128, 4, 6), (256, 4, 3), (256, 8, 4)]
_EXPANDS = {
    PER_ROW: [(512, 1, 1), (1024, 1, 1), (1024, 2, 1), (2048, 1, 2)],
    GROUPED: [(256, 1, 4), (512, 1, 4), (256, 2, 4), (512, 2, 4)],
}
_PREFILL_EXPANDS = [(128, 16, 4), (128, 32, 4), (256, 8, 8), (256, 8, 4)]
_SPLITS = (1, 2, 4, 8, 16)


class _Case(NamedTuple):
    """What one entry of a table is for, and the batches that fall under it: rows of each adapter."""

    shape: Shape
    rank: int
    block_m: int
    num_tiles: int
    layouts: list[list[int]]


def tune(
    shapes: Sequence[Shape], ranks: Sequence[int], rows: Sequence[int], dtype: torch.dtype, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields a table's entries (``tuned.save_table``), each with its time beside the rule's, in µs a group.

    For groups of ``shapes`` with adapters of ``ranks`` and steps of ``rows`` rows, of one adapter, uniform and
    distinct. Ends after ``seconds`` with what was measured until then. Needs the current CUDA device to itself.
    """
    end = time.monotonic() + seconds
    for case in _cases(shapes, ranks, rows):
        if time.monotonic() > end:
            return
        yield _tune_case(case, dtype)


def compile_ahead(
    shapes: Sequence[Shape], ranks: Sequence[int], rows: Sequence[int], dtype: torch.dtype, part: int, parts: int
) -> None:
    """Compiles every ``parts``-th kernel that ``tune`` will want into Triton's cache: compiling takes far longer than
    measuring, and processes can share it."""
    seen = set()
    for case in _cases(shapes, ranks, rows):
        base = _rule(case, dtype)
        for config in _candidates(case, base, dtype.itemsize):
            kernel = (case.shape, case.rank, case.block_m, config[1], replace(config[0], programs=0))
            if kernel in seen:
                continue
            seen.add(kernel)
            if len(seen) % parts == part:
                bench = _Bench(case._replace(num_tiles=1), [1], dtype, copies=2)
                bench.shrink(config)
                bench.expand(config)


def _cases(shapes: Sequence[Shape], ranks: Sequence[int], rows: Sequence[int]) -> Iterator[_Case]:
    found: dict[tuple[int, int], list[list[int]]] = {}
    for m in rows:
        adapters = math.ceil(math.sqrt(m))
        uniform = [m // adapters + (i < m % adapters) for i in range(adapters)]
        for lengths in ([m], uniform, [1] * m):
            if len(lengths) <= _MAX_ADAPTERS:
                for family in plan_families([0, *accumulate(lengths)], range(len(lengths))):
                    layouts = found.setdefault((family.block_m, tile_bucket(family.num_tiles)), [])
                    if lengths not in layouts:
                        layouts.append(lengths)
    for rank in ranks:
        for shape in shapes:
            for (block_m, num_tiles), layouts in found.items():
                layouts.sort(key=lambda lengths: (len(lengths), sum(lengths)))
                ends = layouts[:1] + layouts[-1:] if len(layouts) > 1 else layouts
                yield _Case(shape, rank, block_m, num_tiles, ends)


def _tune_case(case: _Case, dtype: torch.dtype) -> dict[str, Any]:
    """The best pair: shrink and expand share a split, and are independent but for it."""
    base = _rule(case, dtype)
    benches = [_Bench(case, lengths, dtype) for lengths in case.layouts]
    shrinks: dict[ShrinkConfig, float] = {}
    expands: dict[tuple[int, int, ExpandConfig], float] = {}
    for config in [base, *_candidates(case, base, dtype.itemsize)]:
        shrink, expand = config
        if shrink not in shrinks:
            shrinks[shrink] = sum(bench.time(bench.shrink, config) for bench in benches)
        if (shrink.split_k, shrink.programs, expand) not in expands:
            took = sum(bench.time(bench.expand, config) for bench in benches)
            expands[shrink.split_k, shrink.programs, expand] = took
    pairs = {
        (shrink, expand): took + also
        for shrink, took in shrinks.items()
        for (split_k, programs, expand), also in expands.items()
        if (split_k, programs) == (shrink.split_k, shrink.programs)
    }
    shrink, expand = min(pairs, key=lambda pair: pairs[pair])
    key = table_key(case.block_m, case.num_tiles, *case.shape, case.rank, dtype.itemsize)
    return {
        **key._asdict(),
        "shrink": asdict(shrink),
        "expand": asdict(expand),
        "microseconds": round(pairs[shrink, expand] / len(benches), 2),
        "rule_microseconds": round(pairs[base] / len(benches), 2),
    }


def _rule(case: _Case, dtype: torch.dtype) -> Config:
    in_features, widths = case.shape
    return rule(case.block_m, case.num_tiles, in_features, len(widths), case.rank, dtype.itemsize)


def _candidates(case: _Case, base: Config, itemsize: int) -> Iterator[Config]:
    """Every shrink and every expand to try, at every split."""
    shrinks = _SHRINKS.get(case.block_m, _PREFILL_SHRINKS)
    expands = _EXPANDS.get(case.block_m, _PREFILL_EXPANDS)
    into, widths = case.shape
    rank_blocks = -(-case.rank * len(widths) // base[0].block_r)
    for split_k in _SPLITS:
        for i in range(max(len(shrinks), len(expands))):
            size, warps, stages = shrinks[i % len(shrinks)]
            block_k = size // itemsize
            columns, blocks, expand_warps = expands[i % len(expands)]
            if split_k <= max(1, into // block_k):
                programs = case.num_tiles * rank_blocks * split_k
                shrink = replace(base[0], block_k=block_k, split_k=split_k, programs=programs)
                yield (
                    replace(shrink, num_warps=warps, num_stages=stages),
                    replace(base[1], block_n=columns // itemsize, blocks=blocks, num_warps=expand_warps),
                )


class _Bench:
    """Copies of one group, each with weights of its own for every adapter of a batch."""

    def __init__(self, case: _Case, lengths: list[int], dtype: torch.dtype, copies: int | None = None) -> None:
        (into, widths), rank, adapters = case.shape, case.rank, len(lengths)
        size = rank * (into * len(widths) + sum(widths))
        if copies is None:
            most = _MAX_COPIES if sum(lengths) < _MANY_ROWS else _MANY_ROWS_COPIES
            copies = min(2 * -(-_COLD_BYTES // (2 * size * adapters * dtype.itemsize)), most)
        flat = torch.empty(copies * adapters * size, dtype=dtype, device="cuda").normal_(std=0.02)
        parts = [rank * into * len(widths), *(rank * width for width in widths)]
        offsets = (0, *accumulate(widths))
        self._groups = []
        for copy in flat.view(copies, adapters, size):
            slots: list[SlotWeights | None] = []
            for adapter in copy:
                a, *b = adapter.split_with_sizes(parts)
                bs = tuple(piece.view(rank, width).t() for piece, width in zip(b, widths, strict=True))
                slots.append(SlotWeights(a.view(-1, into), bs, (rank,) * len(widths)))
            self._groups.append(LoraGroup(into, offsets, slots))
        self._tables = SlotTables(self._groups, rank, dtype, "cuda")
        rows = sum(lengths)
        self._x = torch.randn(rows, into, device="cuda").to(dtype)
        self._y = torch.zeros(rows, offsets[-1], dtype=dtype, device="cuda")
        starts, slots_of = [0, *accumulate(lengths)], list(range(adapters))
        tiles = RowTiles.build(starts, slots_of, "cuda", case.block_m, case.num_tiles)
        self._segments = Segments.build(starts, slots_of, tiles=(tiles,))
        self._v: dict[int, Tensor] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def shrink(self, config: Config) -> None:
        for group in self._groups:
            sgmv_shrink(self._partial(config), self._x, group, self._segments, config)

    def expand(self, config: Config) -> None:
        for group in self._groups:
            sgmv_expand(self._y, self._partial(config), group, self._segments, config)

    def _partial(self, config: Config) -> Tensor:
        split_k = config[0].split_k
        if split_k not in self._v:
            self._v[split_k] = empty_v(self._x, self._groups[0], self._segments, config).zero_()
        return self._v[split_k]

    def time(self, run: Callable[[Config], None], config: Config) -> float:
        """µs a group, the median of some replays."""
        run(config)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would empty the allocator's cache each time
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            run(config)
            graph.capture_end()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        milliseconds: float = statistics.median(a.elapsed_time(b) for a, b in pairwise(events))
        return milliseconds * 1e3 / len(self._groups)
