"""The shrink kernel: x A^T of each tile, in partial sums; ``triton_common`` says how it works."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from punica_batch_kernels.sgmv.triton_common import load_tile, splits_of, tiles_in_use, weights_at


@triton.jit
def _columns(entry, r, NUM_SLICES: tl.constexpr, SLICE_COLUMNS: tl.constexpr):
    """Where in v the stacked ranks r go."""
    column = r
    if SLICE_COLUMNS > 0:
        for i in tl.static_range(1, NUM_SLICES):
            first = (tl.load(entry + 3 + 2 * i) >> 32).to(tl.int32)
            column = tl.where(r >= first, r - first + i * SLICE_COLUMNS, column)
    return column


@triton.jit(
    do_not_specialize=["num_rows", "split_k", "programs"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"],
)
def shrink_kernel(
    v_ptr,  # [split_k, T, at least rank sum]
    x_ptr,  # [T, K]
    tiles_ptr,  # int32 [N, 4]
    table_ptr,  # int64 [slots, columns]
    num_rows,  # T
    v_stride_row,
    x_stride_row,
    table_stride,
    split_k,
    programs,
    K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # of a single row's loads, which are no tensor cores' operands
    PDL: tl.constexpr,
):
    """v[split, rows of a tile, column of r] = sum over the split's share of K of x[row, k] A[r, k]."""
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    tiles = tiles_in_use(tiles_ptr)
    tile_programs = programs // tiles
    if pid >= tiles * tile_programs:
        return
    program = pid % tile_programs
    first_row, rows, slot = load_tile(tiles_ptr, pid // tile_programs)
    entry = table_ptr + slot * table_stride
    rank = tl.load(entry).to(tl.int32)
    splits = splits_of(rank, tile_programs, split_k, BLOCK_R)
    split, rank_program, rank_programs = program % splits, program // splits, tile_programs // splits
    is_idle = (rows == 0) | (rank_program >= rank_programs) | (rank_program * BLOCK_R >= rank)
    if is_idle & (pid > 0):
        return
    a_ptr = weights_at(tl.load(entry + 1), x_ptr.dtype.element_ty)
    if PDL:
        gdc_wait()
    if rows == 0:
        return

    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_split = (BLOCKS + splits - 1) // splits
    first_block = split * per_split
    last_block = tl.minimum(first_block + per_split, BLOCKS)
    x_ptr += first_row * x_stride_row
    v_ptr += (split.to(tl.int64) * num_rows + first_row) * v_stride_row
    ks = tl.arange(0, BLOCK_K)
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    for r0 in range(rank_program * BLOCK_R, rank, rank_programs * BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        column = _columns(entry, r, NUM_SLICES, SLICE_COLUMNS)
        a_rows = a_ptr + r.to(tl.int64) * K
        if BLOCK_M == 1:
            wide = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
            for block in tl.range(first_block, last_block, num_stages=STAGES):
                k = block * BLOCK_K + ks
                in_k = EVEN_K | (k < K)
                x = tl.load(x_ptr + k, mask=in_k, other=0.0).to(tl.float32)
                a = tl.load(a_rows[:, None] + k[None, :], mask=(r < rank)[:, None] & in_k[None, :], other=0.0)
                wide += a.to(tl.float32) * x[None, :]
            tl.store(v_ptr + column, tl.sum(wide, axis=1), mask=r < rank)
        else:
            m = tl.arange(0, BLOCK_M)
            x_rows = x_ptr + m.to(tl.int64) * x_stride_row
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for block in range(first_block, last_block):
                k = block * BLOCK_K + ks
                in_k = EVEN_K | (k < K)
                x = tl.load(x_rows[:, None] + k[None, :], mask=(m < rows)[:, None] & in_k[None, :], other=0.0)
                a = tl.load(a_rows[None, :] + k[:, None], mask=(r < rank)[None, :] & in_k[:, None], other=0.0)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            v_rows = v_ptr + m.to(tl.int64) * v_stride_row
            tl.store(v_rows[:, None] + column[None, :], acc, mask=(m < rows)[:, None] & (r < rank)[None, :])
