"""What a repacking moves: matrices of a raw file, each to its place in a packed buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Elements that one program moves.
TILE = 4096
# Of a work entry: source, destination, rows, columns, source's row stride, destination's row stride.
FIELDS = 6
_VECTOR = 8
_MIN_RANKS, _MAX_RANKS = 16, 64


@dataclass(frozen=True, slots=True)
class Move:
    """A row-major matrix [rows, columns] of ``dtype`` at element ``source`` (counted in ``dtype``) of the raw data.

    It goes to element ``target`` of the packed buffer: as it is, or ``transposed`` and times ``scale`` (in float32).
    """

    dtype: torch.dtype
    source: int
    target: int
    rows: int
    columns: int
    transposed: bool = False
    scale: float = 1.0

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The moves of one dtype cut into tiles, on the device. ``entries`` int64 [tiles, 6], ``scales`` float32 [tiles].

    A tile of a matrix that is moved as it is has one row (destination's row stride 0). ``block_ranks``: columns of a
    transposed tile, at most. ``vector``: divides every number of ``entries`` that bears on alignment.
    """

    dtype: torch.dtype
    entries: Tensor
    scales: Tensor
    block_ranks: int
    vector: int


def build_work(moves: Sequence[Move], device: torch.device | str) -> tuple[Work, ...]:
    """One ``Work`` a dtype, in the order in which the dtypes first appear."""
    by_dtype: dict[torch.dtype, list[Move]] = {}
    for move in moves:
        by_dtype.setdefault(move.dtype, []).append(move)
    return tuple(_work(dtype, group, device) for dtype, group in by_dtype.items())


def _work(dtype: torch.dtype, moves: Sequence[Move], device: torch.device | str) -> Work:
    widest = max((m.columns for m in moves if m.transposed), default=1)
    block_ranks = min(max(1 << (widest - 1).bit_length(), _MIN_RANKS), _MAX_RANKS)
    parts = [_transposed(m, block_ranks) if m.transposed else _straight(m) for m in moves]
    entries = np.concatenate(parts)
    scales = np.repeat(np.array([m.scale for m in moves], np.float32), [len(part) for part in parts])
    # the length of a tile that is moved as it is, and rows of a transposed one, stand for whole vectors, too
    vector = reduce(gcd, (int(n) for n in np.gcd.reduce(entries, axis=0)), _VECTOR)
    return Work(dtype, torch.from_numpy(entries).to(device), torch.from_numpy(scales).to(device), block_ranks, vector)


def _straight(move: Move) -> NDArray[np.int64]:
    starts = np.arange(0, move.size, TILE, dtype=np.int64)
    zeros = np.zeros_like(starts)
    lengths = np.minimum(TILE, move.size - starts)
    return np.stack([move.source + starts, move.target + starts, zeros, lengths, zeros, zeros], axis=1)


def _transposed(move: Move, block_ranks: int) -> NDArray[np.int64]:
    row, rank = np.meshgrid(
        np.arange(0, move.rows, TILE // block_ranks, dtype=np.int64),
        np.arange(0, move.columns, block_ranks, dtype=np.int64),
        indexing="ij",
    )
    source, target = move.source + row * move.columns + rank, move.target + rank * move.rows + row
    strides = (np.full_like(row, move.columns), np.full_like(row, move.rows))
    fields = (source, target, move.rows - row, move.columns - rank, *strides)
    return np.stack([field.ravel() for field in fields], axis=1)
