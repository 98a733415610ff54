"""A step's segments cut into row tiles: the work list that the device kernels read, the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows of a tile in each family: per row (no tensor cores), grouped decode, prefill.
PER_ROW, GROUPED, PREFILL = 1, 16, 64

# Up to as many rows the base product leaves the tensor cores and some of the launch latency to others (measured): in
# graphs the shrink runs beside it.
MAX_FEW = 64

# Segments of so many rows are long; where they hold so many rows in all, they have launches of their own, which more
# than a few other segments do not share.
_LONG, _MIN_LONG_ROWS, _FEW = 32, 512, 16
# A short segment costs a prefill a tall tile, which takes 0.65 us a layer more than tiles of its own; a tall tile of a
# long segment saves 2.7 us in the kernels of ``fused`` (an H200 at rank 16).
_MAX_SHORT = 4

# What a tile, another row of an adapter that was just read for one, and another pair of launches in every layer cost,
# in adapters read for a row of its own (estimated from an H200's times at rank 16).
_TILE_COST, _REPEAT_COST, _LAUNCH_COST = 2.6, 0.7, 36

IntSequence = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles of at most ``block_m`` consecutive rows of one adapter, or of none.

    ``entries`` int32 [N, 4]: first row, number of rows (0: the tile is unused), slot (-1: base rows), and how many
    tiles share the kernels' programs: those in use, rounded up by ``tile_bucket``, so that a row's sums depend on no
    more than that. N fixes the grids, so a captured graph can be replayed with other values in the same buffer.
    """

    entries: Tensor
    block_m: int

    @classmethod
    def build(
        cls,
        seg_indptr: IntSequence,
        lora_indices: IntSequence,
        device: torch.device | str,
        block_m: int,
        num_tiles: int | None = None,
        segments: NDArray[np.bool_] | None = None,
    ) -> RowTiles:
        """Tiles in a buffer of their own, as ``cut_tiles`` makes them."""
        entries = cut_tiles(seg_indptr, lora_indices, block_m, num_tiles, segments=segments)
        return cls(torch.from_numpy(entries).to(device), block_m)


class Family(NamedTuple):
    """The segments that one kernel family serves in a step: ``segments`` bool [S]. ``num_tiles``: how many tiles of
    ``block_m`` rows they need."""

    block_m: int
    segments: NDArray[np.bool_]
    num_tiles: int


def take_all_rows(seg_indptr: IntSequence, lora_indices: IntSequence) -> bool:
    """Whether a step is a large prefill that is to have tall tiles of all its rows, base rows too: one launch, and the
    kernels of ``fused``. Not with many short segments, nor where most rows are the base model's."""
    lengths, has_lora = np.diff(np.asarray(seg_indptr, dtype=np.int64)), np.asarray(lora_indices) >= 0
    is_long, tall = has_lora & (lengths >= _LONG), -(-lengths // PREFILL)
    if int(lengths[is_long].sum()) < _MIN_LONG_ROWS:
        return False
    num_short = int((has_lora & ~is_long & (lengths > 0)).sum())
    long_tiles = int(tall[is_long].sum())
    return num_short <= _MAX_SHORT * long_tiles and int(tall[~has_lora].sum()) <= long_tiles


def plan_families(seg_indptr: IntSequence, lora_indices: IntSequence, *, all_rows: bool = False) -> list[Family]:
    """Which kernels serve a step. None for a step of base rows; more than one where it pays to launch more.
    ``all_rows``: one family takes them all, as ``take_all_rows`` says.

    Host only, vectorized. Of the rows that no prefill launch takes, each layout's cost is counted in adapters read: all
    of them one by one, all in tiles, or tiles for segments of several rows beside single rows.
    """
    all_lengths, has_lora = np.diff(np.asarray(seg_indptr, dtype=np.int64)), np.asarray(lora_indices) >= 0
    if all_rows:
        return [Family(PREFILL, all_lengths > 0, int((-(-all_lengths // PREFILL)).sum()))]
    lengths = np.where(has_lora, all_lengths, 0)
    parts: list[tuple[int, NDArray[np.bool_]]] = []
    is_long = lengths >= _LONG
    if int(lengths[is_long].sum()) >= _MIN_LONG_ROWS:
        if int((lengths > 0).sum() - is_long.sum()) <= _FEW:
            is_long = lengths > 0
        parts.append((PREFILL, is_long))
        lengths = np.where(is_long, 0, lengths)
    single, several = lengths == 1, lengths > 1
    num_single, rows = int(single.sum()), int(lengths.sum())
    tiles = int((-(-lengths[several] // GROUPED)).sum())
    num_segments = int((lengths > 0).sum())
    one_by_one = num_segments + _REPEAT_COST * (rows - num_segments)
    all_tiles = _TILE_COST * (num_single + tiles)
    both = num_single + _TILE_COST * tiles + _LAUNCH_COST
    if rows and both < min(one_by_one, all_tiles):
        parts += [(GROUPED, several), (PER_ROW, single)]
    elif rows:
        parts.append((GROUPED if all_tiles <= one_by_one else PER_ROW, lengths > 0))
    return [Family(block_m, part, int((-(-all_lengths[part] // block_m)).sum())) for block_m, part in parts]


def tile_bucket(num_tiles: int) -> int:
    """How many tiles to pad to: the next power of two from 8 on. A graph's key."""
    return max(8, 1 << (num_tiles - 1).bit_length()) if num_tiles else 0


def common_families(num_tokens: int) -> list[tuple[tuple[int, int], ...]]:
    """(``block_m``, padded number of tiles) of the families that steps of ``num_tokens`` rows mostly have."""
    most = tile_bucket(int(num_tokens / _TILE_COST) + 1)
    grouped = [8 << i for i in range((most // 8).bit_length())]
    return [((PER_ROW, tile_bucket(num_tokens)),), *(((GROUPED, count),) for count in grouped)]


def build_tiles(
    seg_indptr: IntSequence, lora_indices: IntSequence, device: torch.device | str, *, all_rows: bool = False
) -> tuple[RowTiles, ...]:
    """A step's tiles in buffers of their own, family by family."""
    return tuple(
        RowTiles.build(seg_indptr, lora_indices, device, family.block_m, segments=family.segments)
        for family in plan_families(seg_indptr, lora_indices, all_rows=all_rows)
    )


def cut_tiles(
    seg_indptr: IntSequence,
    lora_indices: IntSequence,
    block_m: int,
    num_tiles: int | None = None,
    *,
    segments: NDArray[np.bool_] | None = None,
) -> NDArray[np.int32]:
    """``RowTiles.entries`` on the host, of ``segments`` (bool [S]; None: all), padded to ``num_tiles``.

    Raises ``ValueError`` when those are too few.
    """
    starts, slots = np.asarray(seg_indptr, dtype=np.int64), np.asarray(lora_indices, dtype=np.int64)
    counts = -(-np.diff(starts) // block_m)
    if segments is not None:
        counts = np.where(segments, counts, 0)
    used = int(counts.sum())
    if num_tiles is not None and used > num_tiles:
        raise ValueError(f"the step's segments need {used} tiles of {block_m} rows, but there are {num_tiles}")
    segment = np.repeat(np.arange(len(slots)), counts)
    within = np.arange(used) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[segment] + within * block_m
    entries = np.zeros((used if num_tiles is None else num_tiles, 4), dtype=np.int32)
    entries[:, 3] = min(tile_bucket(used), len(entries))
    entries[:used, 0] = first
    entries[:used, 1] = np.minimum(starts[segment + 1] - first, block_m)
    entries[:used, 2] = slots[segment]
    return entries
