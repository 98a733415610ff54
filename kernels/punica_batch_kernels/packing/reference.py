"""Repacking in plain torch: what the device kernel means, and its oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from punica_batch_kernels.packing.types import Move


def repack(packed: Tensor, raw: Tensor, moves: Sequence[Move], flag: Tensor) -> None:
    """Carries out ``moves`` from ``raw`` (uint8, flat) into ``packed`` (flat).

    ``flag`` int32 [1] becomes 1 where a value written is NaN or Inf: it was in the file, or overflows ``packed``'s
    dtype. Elements of ``packed`` that no move writes stay as they are.
    """
    for move in moves:
        values = as_dtype(raw, move.dtype)[move.source : move.source + move.size].view(move.rows, move.columns)
        if move.transposed:
            values = (values.float() * move.scale).t()
        target = packed[move.target : move.target + move.size].view(values.shape)
        target.copy_(values)
        if not bool(torch.isfinite(target).all()):
            flag.fill_(1)


def as_dtype(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as elements of ``dtype``; bytes at the end that make no whole element are left out."""
    return raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
