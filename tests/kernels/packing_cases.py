"""Moves as adapters need them, and raw data to move."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from punica_batch_kernels.packing.types import Move
from torch import Tensor

ALIGN = 64


def draw_moves(
    ranks: Sequence[int], dtypes: Sequence[torch.dtype], features: tuple[int, int], seed: int
) -> tuple[list[Move], int, int]:
    """An A [rank, in] and a B [out, rank] for each rank, of the dtypes in turn: moves, elements packed, bytes raw."""
    choose = random.Random(seed)
    moves: list[Move] = []
    source = target = 0
    for i, rank in enumerate(ranks):
        dtype = dtypes[i % len(dtypes)]
        inner, out = choose.sample(features, 2)
        for rows, columns, transposed in ((rank, inner, False), (out, rank, True)):
            source = -(-source // dtype.itemsize) * dtype.itemsize
            scale = 2.0 if transposed else 1.0
            moves.append(Move(dtype, source // dtype.itemsize, target, rows, columns, transposed, scale))
            source += rows * columns * dtype.itemsize
            target += -(-rows * columns // ALIGN) * ALIGN
    return moves, target, source


def raw_data(moves: Sequence[Move], nbytes: int) -> Tensor:
    """Random values where the moves read, uint8 [at least nbytes]."""
    generator = torch.Generator().manual_seed(nbytes)
    raw = torch.zeros(-(-nbytes // 8) * 8, dtype=torch.uint8)
    for move in moves:
        values = torch.randn(move.size, generator=generator).to(move.dtype)
        raw.view(move.dtype)[move.source : move.source + move.size] = values
    return raw
