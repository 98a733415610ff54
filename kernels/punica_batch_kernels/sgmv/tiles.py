"""A step's segments cut into row tiles: the work list that the device kernels read, the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows of a tile in each family: per row (no tensor cores), grouped decode, prefill.
PER_ROW, GROUPED, PREFILL = 1, 16, 64

# Long segments get launches of their own once they hold as many rows as no decode step has; beside them, so do the
# other segments once they are more than a few.
_LONG, _MIN_LONG_ROWS, _FEW = 32, 512, 16


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles of at most ``block_m`` consecutive rows of one adapter; base rows are in none.

    ``entries`` int32 [N, 4]: first row, number of rows, slot, 0. Unused tiles are all 0 (no rows). N fixes the
    kernels' grids, so a captured graph can be replayed with other values in the same buffer.
    """

    entries: Tensor
    block_m: int

    @classmethod
    def build(
        cls,
        seg_indptr: Sequence[int],
        lora_indices: Sequence[int],
        device: torch.device | str,
        block_m: int,
        num_tiles: int | None = None,
    ) -> RowTiles:
        """Tiles of these segments in a buffer of their own: ``num_tiles`` of them, as many as are needed by default.

        Raises ``ValueError`` when ``num_tiles`` are too few.
        """
        return cls(torch.from_numpy(cut_tiles(seg_indptr, lora_indices, block_m, num_tiles)).to(device), block_m)

    def refill(self, seg_indptr: Sequence[int], lora_indices: Sequence[int]) -> None:
        """The next step's segments into the same buffer, by a copy on the current stream that nothing waits for.

        Raises ``ValueError`` when they need more tiles than the buffer has.
        """
        entries = torch.from_numpy(cut_tiles(seg_indptr, lora_indices, self.block_m, self.entries.shape[0]))
        if self.entries.is_cuda:
            entries = entries.pin_memory()  # from a cache that keeps the block until the copy has run
        self.entries.copy_(entries, non_blocking=True)


def choose_families(seg_indptr: Sequence[int], lora_indices: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Which kernels serve a step: for each family its ``block_m``, and ``lora_indices`` with -1 where a segment is
    another family's. None for a step of base rows, two where many decode rows stand beside a long prefill."""
    lengths, slots = np.diff(np.asarray(seg_indptr, dtype=np.int64)), np.asarray(lora_indices, dtype=np.int64)
    lengths = np.where(slots >= 0, lengths, 0)
    families = []
    rest = slots
    if int(lengths[lengths >= _LONG].sum()) >= _MIN_LONG_ROWS:
        few = int(((lengths > 0) & (lengths < _LONG)).sum()) <= _FEW
        long = slots if few else np.where(lengths >= _LONG, slots, -1)
        families.append((PREFILL, long.tolist()))
        rest = np.where(long >= 0, -1, slots)
    rows = int(lengths[rest >= 0].sum())
    if rows:
        tiles = int((-(-lengths[rest >= 0] // GROUPED)).sum())
        families.append((GROUPED if 3 * tiles <= 2 * rows else PER_ROW, rest.tolist()))
    return families


def build_tiles(
    seg_indptr: Sequence[int], lora_indices: Sequence[int], device: torch.device | str
) -> tuple[RowTiles, ...]:
    """A step's tiles in buffers of their own, family by family."""
    families = choose_families(seg_indptr, lora_indices)
    return tuple(RowTiles.build(seg_indptr, slots, device, block_m) for block_m, slots in families)


def cut_tiles(
    seg_indptr: Sequence[int], lora_indices: Sequence[int], block_m: int, num_tiles: int | None = None
) -> NDArray[np.int32]:
    """``RowTiles.entries`` on the host, padded to ``num_tiles``. Raises ``ValueError`` when those are too few."""
    starts, slots = np.asarray(seg_indptr, dtype=np.int64), np.asarray(lora_indices, dtype=np.int64)
    counts = np.where(slots >= 0, -(-np.diff(starts) // block_m), 0)
    used = int(counts.sum())
    if num_tiles is not None and used > num_tiles:
        raise ValueError(f"the step's segments need {used} tiles of {block_m} rows, but there are {num_tiles}")
    segment = np.repeat(np.arange(len(slots)), counts)
    within = np.arange(used) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[segment] + within * block_m
    entries = np.zeros((used if num_tiles is None else num_tiles, 4), dtype=np.int32)
    entries[:used, 0] = first
    entries[:used, 1] = np.minimum(starts[segment + 1] - first, block_m)
    entries[:used, 2] = slots[segment]
    return entries
