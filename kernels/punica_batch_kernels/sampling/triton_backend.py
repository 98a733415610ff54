"""Launches of the sampling kernels: nothing waits for the device, and everything can be captured in a CUDA graph."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from punica_batch_kernels.sampling.triton_kernels import argmax_join_kernel, argmax_split_kernel, draw_kernel
from punica_batch_kernels.sampling.types import DrawParams, Greedy

# Low bits of a float32 that a number of the dtype cannot have.
_SHIFTS = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}
_ARGMAX_BLOCK = 2048
# Enough programs for every multiprocessor of the largest GPU several times over.
_ARGMAX_PROGRAMS = 1024
_DRAW_BLOCK = 2048


def greedy(logits: Tensor) -> Greedy:
    """The likeliest token of each row, the lowest id of equals.

    ``logits`` [R, V] of float16, bfloat16 or float32, rows strided or not. A row is finite when its largest logit is
    and none is NaN; the token of one that is not is some token.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _ARGMAX_BLOCK)
    span = triton.cdiv(blocks, min(blocks, triton.cdiv(_ARGMAX_PROGRAMS, max(rows, 1)))) * _ARGMAX_BLOCK
    splits = triton.cdiv(vocab, span)
    device = logits.device
    found = Greedy(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    if rows:
        best = torch.empty(rows, splits, dtype=torch.float32, device=device)
        index = torch.empty(rows, splits, dtype=torch.int32, device=device)
        argmax_split_kernel[(rows, splits)](
            logits, best, index, logits.stride(0), span, V=vocab, BLOCK=_ARGMAX_BLOCK, num_warps=8
        )
        argmax_join_kernel[(rows,)](best, index, *found, splits, MAX_SPLITS=triton.next_power_of_2(blocks), num_warps=1)
    return found


def draw(logits: Tensor, found: Greedy, params: DrawParams, *, span: float) -> None:
    """Overwrites ``found.token_ids`` of the rows in ``params`` that are finite with the tokens that they draw.

    ``logits`` as for ``greedy``; ``found``: its answer for them. ``span``: more than the widest difference of two
    draws of the noise. Filters, noise and ties as the torch code of ``punica_batch.engine.sampler`` has them.
    """
    count = params.numbers.shape[1]
    if count:
        draw_kernel[(count,)](
            logits, found.largest, found.finite, params.numbers, params.shares, found.token_ids, logits.stride(0),
            V=logits.shape[1], SHIFT=_SHIFTS[logits.dtype], SPAN=span, BLOCK=_DRAW_BLOCK, num_warps=16,
        )  # fmt: skip
