"""The expand kernel: v B^T of each tile onto y; ``triton_common`` says how it works."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from punica_batch_kernels.sgmv.tiles import PREFILL
from punica_batch_kernels.sgmv.triton_common import load_tile, splits_of, tiles_in_use, weights_at

# Tiles of so many rows fill tensor cores by themselves, and what they move comes from memory, not from the cache.
TALL = tl.constexpr(PREFILL)


@triton.jit
def _rank_and_column(packed, index, SLICE_COLUMNS: tl.constexpr):
    """Of a table's pair entry for slice ``index``: its rank, and where its ranks begin in v."""
    if SLICE_COLUMNS > 0:
        column = (index * SLICE_COLUMNS).to(tl.int64)
    else:
        column = packed >> 32
    return packed.to(tl.int32), column


@triton.jit
def sum_splits(
    v_ptr,
    num_rows,
    v_stride_row,
    rows,
    r,
    rank,
    splits,
    SLICE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """v at a tile's rows and ranks r, float32 [BLOCK_M, BLOCK_R], its ``splits`` partial sums added in a fixed order.

    One row: [BLOCK_R]. ``SPLIT_K``, a power of two, is the most there are; tall tiles hold one at a time.
    """
    # within a slice's columns ranks are masked by fours, and so 16 bytes load at a time; what is too much is dropped
    FOURS: tl.constexpr = 4 if SLICE_COLUMNS > 0 else 1
    s = tl.arange(0, SPLIT_K)
    split_ptr = v_ptr + s.to(tl.int64) * num_rows * v_stride_row
    in_rank = r // FOURS * FOURS < rank
    if BLOCK_M == 1:
        parts = tl.load(split_ptr[:, None] + r[None, :], mask=(s < splits)[:, None] & in_rank[None, :], other=0.0)
        total = tl.where(r < rank, tl.sum(parts.to(tl.float32), axis=0), 0.0)
    elif BLOCK_M >= TALL:
        m = tl.arange(0, BLOCK_M)
        row_ptr = v_ptr + m.to(tl.int64)[:, None] * v_stride_row + r[None, :]
        mask = (m < rows)[:, None] & in_rank[None, :]
        total = tl.load(row_ptr, mask=mask, other=0.0).to(tl.float32)
        for i in tl.static_range(1, SPLIT_K):
            row_ptr += tl.cast(num_rows, tl.int64) * v_stride_row
            total += tl.load(row_ptr, mask=mask & (i < splits), other=0.0).to(tl.float32)
        total = tl.where((r < rank)[None, :], total, 0.0)
    else:
        m = tl.arange(0, BLOCK_M)
        at = split_ptr[:, None, None] + m.to(tl.int64)[None, :, None] * v_stride_row + r[None, None, :]
        mask = (s < splits)[:, None, None] & (m < rows)[None, :, None] & in_rank[None, None, :]
        parts = tl.load(at, mask=mask, other=0.0)
        total = tl.where((r < rank)[None, :], tl.sum(parts.to(tl.float32), axis=0), 0.0)
    return total


@triton.jit
def product(v, b, BLOCK_M: tl.constexpr):
    """v [BLOCK_M, BLOCK_R] times b [BLOCK_R, BLOCK_N], summed in float32; v and the product flat for one row."""
    if BLOCK_M == 1:
        product = tl.sum(v[:, None] * b.to(tl.float32), axis=0)
    else:
        product = tl.dot(v.to(b.dtype), b, input_precision="ieee")
    return product


@triton.jit
def load_b(b_ptr, r, rank, n, width):
    """B [rank, width] at ranks r and columns n."""
    at = b_ptr + r.to(tl.int64)[:, None] * width + n[None, :]
    return tl.load(at, mask=(r < rank)[:, None] & (n < width)[None, :], other=0.0)


@triton.jit
def _y_block(y_ptr, y_stride_row, rows, n, width, BLOCK_M: tl.constexpr):
    """Where y's block at columns n is, and which of it exists; flat for one row."""
    if BLOCK_M == 1:
        at = y_ptr + n
        mask = n < width
    else:
        m = tl.arange(0, BLOCK_M)
        at = y_ptr + m.to(tl.int64)[:, None] * y_stride_row + n[None, :]
        mask = (m < rows)[:, None] & (n < width)[None, :]
    return at, mask


@triton.jit
def _expand_tile(
    tile,
    tiles,
    index,
    start,
    width,
    n,
    y_ptr,
    v_ptr,
    tiles_ptr,
    table_ptr,
    num_rows,
    v_stride_row,
    y_stride_row,
    table_stride,
    shrink_programs,
    SLICE_COLUMNS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SHRINK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The columns from n on of slice ``index``, which begins at ``start``, for one tile."""
    first_row, rows, slot = load_tile(tiles_ptr, tile)
    entry = table_ptr + slot * table_stride
    b_ptr = weights_at(tl.load(entry + 2 + 2 * index), y_ptr.dtype.element_ty)
    rank, column = _rank_and_column(tl.load(entry + 3 + 2 * index), index, SLICE_COLUMNS)
    if (rows > 0) & (rank > 0):
        ranks = tl.arange(0, BLOCK_R)
        splits = splits_of(tl.load(entry).to(tl.int32), shrink_programs // tiles, SPLIT_K, SHRINK_R)
        v_ptr += first_row * v_stride_row + column
        y_ptr += first_row * y_stride_row + start
        # the first of B is asked for before v, which the shrink may still be writing
        b = load_b(b_ptr, ranks, rank, n, width)
        if PDL:
            gdc_wait()
        y_at, mask = _y_block(y_ptr, y_stride_row, rows, n, width, BLOCK_M)
        y = tl.load(y_at, mask=mask, other=0.0)
        v = sum_splits(v_ptr, num_rows, v_stride_row, rows, ranks, rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K)
        for i in tl.static_range(BLOCKS):
            if i + 1 < BLOCKS:  # ask for the next block before this one is used
                next_n = n + BLOCK_N
                next_b = load_b(b_ptr, ranks, rank, next_n, width)
                next_at, next_mask = _y_block(y_ptr, y_stride_row, rows, next_n, width, BLOCK_M)
                next_y = tl.load(next_at, mask=next_mask, other=0.0)
            add = product(v, b, BLOCK_M)
            if MAX_RANK > BLOCK_R:
                for r0 in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=STAGES):
                    r = r0 + ranks
                    more = sum_splits(
                        v_ptr, num_rows, v_stride_row, rows, r, rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K
                    )
                    add += product(more, load_b(b_ptr, r, rank, n, width), BLOCK_M)
            tl.store(y_at, (add + y.to(tl.float32)).to(y_ptr.dtype.element_ty), mask=mask)
            if i + 1 < BLOCKS:
                n, b, y_at, mask, y = next_n, next_b, next_at, next_mask, next_y


@triton.jit
def _expand_tall_tile(
    tile,
    tiles,
    index,
    start,
    width,
    first_column,
    y_ptr,
    v_ptr,
    tiles_ptr,
    table_ptr,
    num_rows,
    v_stride_row,
    y_stride_row,
    table_stride,
    shrink_programs,
    SLICE_COLUMNS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SHRINK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As ``_expand_tile`` of columns from ``first_column`` on: what leads to them is read once, and ``STAGES`` blocks
    of columns are under way at a time."""
    first_row, rows, slot = load_tile(tiles_ptr, tile)
    entry = table_ptr + slot * table_stride
    b_ptr = weights_at(tl.load(entry + 2 + 2 * index), y_ptr.dtype.element_ty)
    rank, column = _rank_and_column(tl.load(entry + 3 + 2 * index), index, SLICE_COLUMNS)
    if (rows > 0) & (rank > 0):
        ranks = tl.arange(0, BLOCK_R)
        splits = splits_of(tl.load(entry).to(tl.int32), shrink_programs // tiles, SPLIT_K, SHRINK_R)
        if PDL:
            gdc_wait()
        v_ptr += first_row * v_stride_row + column
        y_ptr += first_row * y_stride_row + start
        v = sum_splits(v_ptr, num_rows, v_stride_row, rows, ranks, rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K)
        v = v.to(y_ptr.dtype.element_ty)
        blocks = tl.minimum(tl.cdiv(width - first_column, BLOCK_N), BLOCKS)
        for block in tl.range(0, blocks, num_stages=STAGES):
            n = first_column + block * BLOCK_N + tl.arange(0, BLOCK_N)
            y_at, mask = _y_block(y_ptr, y_stride_row, rows, n, width, BLOCK_M)
            y = tl.load(y_at, mask=mask, other=0.0)
            add = product(v, load_b(b_ptr, ranks, rank, n, width), BLOCK_M)
            if MAX_RANK > BLOCK_R:
                for r0 in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                    r = r0 + ranks
                    more = sum_splits(
                        v_ptr, num_rows, v_stride_row, rows, r, rank, splits, SLICE_COLUMNS, BLOCK_M, SPLIT_K
                    )
                    add += product(more, load_b(b_ptr, r, rank, n, width), BLOCK_M)
            tl.store(y_at, (add + y.to(tl.float32)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "shrink_programs"], do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"]
)
def expand_kernel(
    y_ptr,  # [T, all slices side by side]
    v_ptr,  # [SPLIT_K, T, columns]
    tiles_ptr,  # int32 [N, 4]
    table_ptr,  # int64 [slots, columns]
    num_rows,  # T
    v_stride_row,
    y_stride_row,
    table_stride,
    shrink_programs,
    WIDTH_0: tl.constexpr,  # of each slice; 0: there is none
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_DIVISOR: tl.constexpr,  # divides every width
    SLICE_COLUMNS: tl.constexpr,
    MAX_RANK: tl.constexpr,  # of a slice
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,  # of BLOCK_N columns, one after the other in a program
    SPLIT_K: tl.constexpr,
    SHRINK_R: tl.constexpr,  # the shrink's BLOCK_R
    STAGES: tl.constexpr,  # of the loads of ranks beyond the first BLOCK_R; of tall tiles, of the columns' blocks
    IN_TURN: tl.constexpr,  # programs take tiles in turn: there are fewer than tiles times spans of columns
    PDL: tl.constexpr,
):
    """y[rows of a tile, n] += sum over r of v[row, r] B[r, n], v's partial sums added first."""
    SPAN: tl.constexpr = BLOCK_N * BLOCKS
    SPANS_0: tl.constexpr = (WIDTH_0 + SPAN - 1) // SPAN
    SPANS_1: tl.constexpr = (WIDTH_1 + SPAN - 1) // SPAN
    SPANS_2: tl.constexpr = (WIDTH_2 + SPAN - 1) // SPAN
    SPANS: tl.constexpr = SPANS_0 + SPANS_1 + SPANS_2
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    first_tile, span = pid // SPANS, pid % SPANS
    tiles = tiles_in_use(tiles_ptr)
    in_1, in_2 = span >= SPANS_0, span >= SPANS_0 + SPANS_1
    index = in_1.to(tl.int32) + in_2.to(tl.int32)
    width = tl.multiple_of(tl.where(in_2, WIDTH_2, tl.where(in_1, WIDTH_1, WIDTH_0)), WIDTH_DIVISOR)
    start = tl.multiple_of(tl.where(in_2, WIDTH_0 + WIDTH_1, tl.where(in_1, WIDTH_0, 0)), WIDTH_DIVISOR)
    span -= tl.where(in_2, SPANS_0 + SPANS_1, tl.where(in_1, SPANS_0, 0))
    n = span * SPAN + tl.arange(0, BLOCK_N)
    if BLOCK_M >= TALL:
        _expand_tall_tile(
            first_tile, tiles, index, start, width, span * SPAN, y_ptr, v_ptr, tiles_ptr, table_ptr, num_rows,
            v_stride_row, y_stride_row, table_stride, shrink_programs, SLICE_COLUMNS, MAX_RANK, BLOCK_M, BLOCK_R,
            BLOCK_N, BLOCKS, SPLIT_K, SHRINK_R, STAGES, PDL,
        )  # fmt: skip
    elif IN_TURN:
        for tile in range(first_tile, tiles, tl.num_programs(0) // SPANS):
            _expand_tile(
                tile, tiles, index, start, width, n, y_ptr, v_ptr, tiles_ptr, table_ptr, num_rows, v_stride_row,
                y_stride_row, table_stride, shrink_programs, SLICE_COLUMNS, MAX_RANK, BLOCK_M, BLOCK_R, BLOCK_N,
                BLOCKS, SPLIT_K, SHRINK_R, STAGES, PDL,
            )  # fmt: skip
    else:
        _expand_tile(
            first_tile, tiles, index, start, width, n, y_ptr, v_ptr, tiles_ptr, table_ptr, num_rows, v_stride_row,
            y_stride_row, table_stride, shrink_programs, SLICE_COLUMNS, MAX_RANK, BLOCK_M, BLOCK_R, BLOCK_N,
            BLOCKS, SPLIT_K, SHRINK_R, STAGES, PDL,
        )  # fmt: skip
    if PDL:  # noqa: SIM102 (a constant)
        if pid == 0:
            gdc_wait()
