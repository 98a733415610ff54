"""Kernels that follow a product with adapters and take over its expand, so that what it makes is never stored.

Tiles are tall and cover every row: those without an adapter have slot -1, whose row of a table is all 0, and get
nothing added. A program reads what leads to its rows' v and adapter once and then goes through several blocks of
columns, ``STAGES`` of them under way at a time. What they compute besides: ``elementwise.reference``. v, tables, PDL:
``triton_common``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from punica_batch_kernels.sgmv.triton_common import load_tile, splits_of, tiles_in_use, weights_at
from punica_batch_kernels.sgmv.triton_expand import load_b, product, sum_splits


@triton.jit
def _slice(entry, index, SLICE_COLUMNS: tl.constexpr):
    """B's address, its rank and where its ranks begin in v, of an adapter's slice ``index``."""
    pair = entry + 2 + 2 * index
    return tl.load(pair), tl.load(pair + 1).to(tl.int32), index * SLICE_COLUMNS


@triton.jit(
    do_not_specialize=["num_rows", "shrink_programs"], do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"]
)
def expand_silu_kernel(
    out_ptr,  # [T, SIZE]
    y_ptr,  # [T, 2 SIZE]: gate, up
    v_ptr,  # [SPLIT_K, T, columns]
    tiles_ptr,  # int32 [N, 4]
    table_ptr,  # int64 [slots, columns]
    num_rows,  # T
    v_stride_row,
    table_stride,
    shrink_programs,
    SIZE: tl.constexpr,
    SLICE_COLUMNS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,  # of BLOCK_N columns, one after the other in a program
    SPLIT_K: tl.constexpr,
    SHRINK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = silu(gate + v_gate B_gate) * (up + v_up B_up), for a tile and ``BLOCKS`` times ``BLOCK_N`` columns."""
    SPAN: tl.constexpr = BLOCK_N * BLOCKS
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    tile, first_column = pid // SPANS, pid % SPANS * SPAN
    first_row, rows, slot = load_tile(tiles_ptr, tile)
    if (rows == 0) & (tile > 0):  # as in the shrink
        return
    element_type: tl.constexpr = y_ptr.dtype.element_ty
    entry = table_ptr + slot * table_stride
    gate_address, gate_rank, gate_column = _slice(entry, 0, SLICE_COLUMNS)
    up_address, up_rank, up_column = _slice(entry, 1, SLICE_COLUMNS)
    gate_b, up_b = weights_at(gate_address, element_type), weights_at(up_address, element_type)
    splits = splits_of(tl.load(entry).to(tl.int32), shrink_programs // tiles_in_use(tiles_ptr), SPLIT_K, SHRINK_R)
    ranks = tl.arange(0, BLOCK_R)
    m = tl.arange(0, BLOCK_M)
    row = (first_row + m)[:, None]
    v_ptr += first_row * v_stride_row
    if PDL:
        gdc_wait()
    v_gate = sum_splits(
        v_ptr + gate_column, num_rows, v_stride_row, rows, ranks, gate_rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K
    ).to(element_type)
    v_up = sum_splits(
        v_ptr + up_column, num_rows, v_stride_row, rows, ranks, up_rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K
    ).to(element_type)
    blocks = tl.minimum(tl.cdiv(SIZE - first_column, BLOCK_N), BLOCKS)
    for block in tl.range(0, blocks, num_stages=STAGES):
        n = first_column + block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (m < rows)[:, None] & ((SIZE % BLOCK_N == 0) | (n < SIZE))[None, :]
        gate = tl.load(y_ptr + row * (2 * SIZE) + n[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + row * (2 * SIZE) + SIZE + n[None, :], mask=mask, other=0.0).to(tl.float32)
        gate += product(v_gate, load_b(gate_b, ranks, gate_rank, n, SIZE), BLOCK_M)
        up += product(v_up, load_b(up_b, ranks, up_rank, n, SIZE), BLOCK_M)
        if MAX_RANK > BLOCK_R:
            for r0 in tl.range(BLOCK_R, tl.maximum(gate_rank, up_rank), BLOCK_R, num_stages=1):
                r = r0 + ranks
                v = sum_splits(
                    v_ptr + gate_column, num_rows, v_stride_row, rows, r, gate_rank, splits, SLICE_COLUMNS, BLOCK_M,
                    SPLIT_K,
                )  # fmt: skip
                gate += product(v, load_b(gate_b, r, gate_rank, n, SIZE), BLOCK_M)
                v = sum_splits(
                    v_ptr + up_column, num_rows, v_stride_row, rows, r, up_rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K
                )
                up += product(v, load_b(up_b, r, up_rank, n, SIZE), BLOCK_M)
        out = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + row * SIZE + n[None, :], out.to(element_type), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "shrink_programs", "eps"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr", "slots_ptr"],
)
def expand_rope_kernel(
    qkv_ptr,
    v_ptr,  # [SPLIT_K, T, columns]
    tiles_ptr,  # int32 [N, 4]
    table_ptr,  # int64 [slots, columns]
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    eps,
    num_rows,  # T
    qkv_stride,
    v_stride_row,
    table_stride,
    shrink_programs,
    k_stride_block,
    k_stride_slot,
    v_stride_block,
    v_stride_slot,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SLICE_COLUMNS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a head each, one after the other in a program: divides NUM_HEADS and KV_HEADS
    SPLIT_K: tl.constexpr,
    SHRINK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BLOCKS`` heads of a tile's rows: qkv + v B, normed, rotated and stored as ``triton_rope`` does."""
    SPANS: tl.constexpr = (NUM_HEADS + 2 * KV_HEADS) // BLOCKS
    DIM: tl.constexpr = 2 * HALF
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    first_head, tile = pid % SPANS * BLOCKS, pid // SPANS
    first_row, rows, slot = load_tile(tiles_ptr, tile)
    if (rows == 0) & (tile > 0):  # as in the shrink
        return
    is_v, is_q = first_head >= NUM_HEADS + KV_HEADS, first_head < NUM_HEADS
    index = tl.where(is_v, 2, tl.where(is_q, 0, 1))
    in_slice = first_head - tl.where(is_v, NUM_HEADS + KV_HEADS, tl.where(is_q, 0, NUM_HEADS))
    width = tl.where(is_q, NUM_HEADS * DIM, KV_HEADS * DIM)
    element_type: tl.constexpr = qkv_ptr.dtype.element_ty
    entry = table_ptr + slot * table_stride
    address, rank, column = _slice(entry, index, SLICE_COLUMNS)
    b_ptr = weights_at(address, element_type) + in_slice * DIM
    splits = splits_of(tl.load(entry).to(tl.int32), shrink_programs // tiles_in_use(tiles_ptr), SPLIT_K, SHRINK_R)
    ranks, d, m = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_M)
    in_half = (BLOCK_HALF == HALF) | (d < HALF)
    real = (m < rows)[:, None] & in_half[None, :]
    row = (first_row + m)[:, None]
    if PDL:
        gdc_wait()
    slots = tl.load(slots_ptr + row, mask=(m < rows)[:, None], other=0)
    turns = real & (first_head < NUM_HEADS + KV_HEADS)  # values stay as they are
    cos = tl.load(cos_ptr + row * HALF + d[None, :], mask=turns, other=1.0)
    sin = tl.load(sin_ptr + row * HALF + d[None, :], mask=turns, other=0.0)
    if NORM:
        norm_ptr = k_norm_ptr
        if is_q:
            norm_ptr = q_norm_ptr
        first_norm = tl.load(norm_ptr + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
        second_norm = tl.load(norm_ptr + HALF + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
    x_ptr = qkv_ptr + row * qkv_stride + first_head * DIM + d[None, :]
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    to = k_cache_ptr + block * k_stride_block + offset * k_stride_slot + in_slice * DIM + d[None, :]
    if is_v:
        to = v_cache_ptr + block * v_stride_block + offset * v_stride_slot + in_slice * DIM + d[None, :]
    if is_q:
        to = x_ptr
    v_ptr += first_row * v_stride_row + column
    v = sum_splits(v_ptr, num_rows, v_stride_row, rows, ranks, rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K)
    v = v.to(element_type)
    for head in tl.range(0, BLOCKS, num_stages=STAGES):
        n = head * DIM + d
        first = tl.load(x_ptr + head * DIM, mask=real, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + head * DIM + HALF, mask=real, other=0.0).to(tl.float32)
        first += product(v, _half_of_b(b_ptr, ranks, rank, n, in_half, width), BLOCK_M)
        second += product(v, _half_of_b(b_ptr + HALF, ranks, rank, n, in_half, width), BLOCK_M)
        if MAX_RANK > BLOCK_R:
            for r0 in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                r = r0 + ranks
                more = sum_splits(v_ptr, num_rows, v_stride_row, rows, r, rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K)
                first += product(more, _half_of_b(b_ptr, r, rank, n, in_half, width), BLOCK_M)
                second += product(more, _half_of_b(b_ptr + HALF, r, rank, n, in_half, width), BLOCK_M)
        if NORM:
            mean = tl.sum(first * first + second * second, axis=1) / DIM
            scale = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
            first = tl.where(is_v, first, first * scale * first_norm)
            second = tl.where(is_v, second, second * scale * second_norm)
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        tl.store(to + head * DIM, turned_first.to(element_type), mask=real)
        tl.store(to + head * DIM + HALF, turned_second.to(element_type), mask=real)


@triton.jit
def _half_of_b(b_ptr, r, rank, n, in_half, width):
    """B [rank, width] at ranks r and a head's columns n, of which ``in_half`` exist."""
    at = b_ptr + r.to(tl.int64)[:, None] * width + n[None, :]
    return tl.load(at, mask=(r < rank)[:, None] & in_half[None, :], other=0.0)
