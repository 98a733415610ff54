"""Repacking in Triton: one launch a dtype of the file, whatever matrices it holds."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from punica_batch_kernels.packing.reference import as_dtype
from punica_batch_kernels.packing.types import FIELDS, TILE, Work


def repack(packed: Tensor, raw: Tensor, work: Sequence[Work], flag: Tensor) -> None:
    """``reference.repack`` of the moves that ``work`` was built from, on the current stream."""
    for part in work:
        repack_kernel[(part.entries.shape[0],)](
            packed,
            as_dtype(raw, part.dtype),
            part.entries,
            part.scales,
            flag,
            FIELDS=FIELDS,
            BLOCK=TILE,
            BLOCK_RANKS=part.block_ranks,
            VECTOR=part.vector,
            num_warps=4,
        )


@triton.jit
def _raise_flag(flag_ptr, values):
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    tl.store(flag_ptr, 1, mask=tl.min(tl.ravel(finite.to(tl.int32)), axis=0) == 0)


@triton.jit
def repack_kernel(
    packed_ptr,
    raw_ptr,
    entries_ptr,
    scales_ptr,
    flag_ptr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One tile. The source's rows are read along their columns and the destination's written along its own, so that
    both are whole cache lines; the layout changes on the chip in between."""
    entry = entries_ptr + tl.program_id(0).to(tl.int64) * FIELDS
    source = raw_ptr + tl.multiple_of(tl.load(entry), VECTOR)
    target = packed_ptr + tl.multiple_of(tl.load(entry + 1), VECTOR)
    rows = tl.multiple_of(tl.load(entry + 2), VECTOR)
    columns = tl.multiple_of(tl.load(entry + 3), VECTOR)
    source_stride = tl.multiple_of(tl.load(entry + 4), VECTOR)
    target_stride = tl.multiple_of(tl.load(entry + 5), VECTOR)
    if target_stride == 0:
        i = tl.arange(0, BLOCK)
        straight = tl.load(source + i, mask=i < columns, other=0).to(tl.float32).to(packed_ptr.dtype.element_ty)
        tl.store(target + i, straight, mask=i < columns)
        _raise_flag(flag_ptr, straight)
    else:
        row = tl.arange(0, BLOCK // BLOCK_RANKS)[:, None]
        rank = tl.arange(0, BLOCK_RANKS)[None, :]
        mask = (row < rows) & (rank < columns)
        values = tl.load(source + row * source_stride + rank, mask=mask, other=0).to(tl.float32)
        scaled = (values * tl.load(scales_ptr + tl.program_id(0))).to(packed_ptr.dtype.element_ty)
        tl.store(target + rank * target_stride + row, scaled, mask=mask)
        _raise_flag(flag_ptr, scaled)
