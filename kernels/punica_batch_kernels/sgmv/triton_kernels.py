"""The shrink and expand kernels. What they compute: ``reference``; what they read: ``tiles`` and ``slot_table``.

Tiles of one row multiply and sum without tensor cores, for there the weights' bytes are all that counts; taller tiles
use ``tl.dot``. Accumulation is in float32. K's partial sums lie side by side in v and the expand adds them in a fixed
order. v's columns: each slice's ranks begin at a multiple of ``SLICE_COLUMNS``, or, where that is 0, at the sum of the
ranks before it.

With ``PDL`` (Hopper's programmatic dependent launch) a kernel may start while the one before it still runs, and waits
where it first needs, or overwrites, what that one has to do with. Tables, tiles and weights it reads before: no kernel
of the step writes them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _weights(address, element_type: tl.constexpr):
    """A pointer from a table's address; ``SlotTables`` sees to the alignment."""
    return tl.multiple_of(address.to(tl.pointer_type(element_type)), 16)


@triton.jit
def _tile(tiles_ptr, tile):
    """A tile's first row, how many rows it has (0: it is unused), and its slot."""
    first_row = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    return first_row, tl.load(tiles_ptr + tile * 4 + 1), tl.load(tiles_ptr + tile * 4 + 2).to(tl.int64)


@triton.jit
def _rank_and_column(packed, index, SLICE_COLUMNS: tl.constexpr):
    """Of a table's pair entry for slice ``index``: its rank, and where its ranks begin in v."""
    if SLICE_COLUMNS > 0:
        column = (index * SLICE_COLUMNS).to(tl.int64)
    else:
        column = packed >> 32
    return packed.to(tl.int32), column


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
    do_not_specialize=["num_rows", "split_k", "rank_programs"],
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
    rank_programs,
    K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """v[split, rows of a tile, column of r] = sum over the split's share of K of x[row, k] A[r, k]."""
    pid = tl.program_id(0)
    rank_program = pid % rank_programs
    split = pid // rank_programs % split_k
    tile = pid // (rank_programs * split_k)
    if PDL:
        gdc_launch_dependents()
    first_row, rows, slot = _tile(tiles_ptr, tile)
    # an unused tile: gone at once, but for the first, as one program at least must wait for the kernel before
    if (rows == 0) & (tile > 0):
        return
    entry = table_ptr + slot * table_stride
    rank = tl.load(entry).to(tl.int32)
    a_ptr = _weights(tl.load(entry + 1), x_ptr.dtype.element_ty)
    if PDL:
        gdc_wait()
    if rows == 0:
        return

    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    per_split = (BLOCKS + split_k - 1) // split_k
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
            for block in range(first_block, last_block):
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


@triton.jit
def _sum_splits(
    v_ptr,
    num_rows,
    v_stride_row,
    rows,
    r,
    rank,
    SLICE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """v at a tile's rows and ranks r, float32 [BLOCK_M, BLOCK_R], its partial sums added in a fixed order.

    One row: [BLOCK_R]. ``SPLIT_K`` is a power of two.
    """
    splits = v_ptr + tl.arange(0, SPLIT_K).to(tl.int64) * num_rows * v_stride_row
    # within a slice's columns no rank is masked, and so 16 bytes load at a time; what lies beyond the rank is dropped
    if BLOCK_M == 1:
        mask = (r < rank)[None, :] if SLICE_COLUMNS == 0 else None
        parts = tl.load(splits[:, None] + r[None, :], mask=mask)
        total = tl.where(r < rank, tl.sum(parts.to(tl.float32), axis=0), 0.0)
    else:
        m = tl.arange(0, BLOCK_M)
        at = splits[:, None, None] + m.to(tl.int64)[None, :, None] * v_stride_row + r[None, None, :]
        mask = (m < rows)[None, :, None]
        if SLICE_COLUMNS == 0:
            mask &= (r < rank)[None, None, :]
        parts = tl.load(at, mask=mask, other=0.0)
        total = tl.where((r < rank)[None, :], tl.sum(parts.to(tl.float32), axis=0), 0.0)
    return total


@triton.jit
def _product(v, b, BLOCK_M: tl.constexpr):
    """v [BLOCK_M, BLOCK_R] times b [BLOCK_R, BLOCK_N], summed in float32; v and the product flat for one row."""
    if BLOCK_M == 1:
        product = tl.sum(v[:, None] * b.to(tl.float32), axis=0)
    else:
        product = tl.dot(v.to(b.dtype), b, input_precision="ieee")
    return product


@triton.jit
def _load_b(b_ptr, r, rank, n, width):
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


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"])
def expand_kernel(
    y_ptr,  # [T, all slices side by side]
    v_ptr,  # [SPLIT_K, T, columns]
    tiles_ptr,  # int32 [N, 4]
    table_ptr,  # int64 [slots, columns]
    num_rows,  # T
    v_stride_row,
    y_stride_row,
    table_stride,
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
    PDL: tl.constexpr,
):
    """y[rows of a tile, n] += sum over r of v[row, r] B[r, n], v's partial sums added first."""
    SPAN: tl.constexpr = BLOCK_N * BLOCKS
    SPANS_0: tl.constexpr = (WIDTH_0 + SPAN - 1) // SPAN
    SPANS_1: tl.constexpr = (WIDTH_1 + SPAN - 1) // SPAN
    SPANS_2: tl.constexpr = (WIDTH_2 + SPAN - 1) // SPAN
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    span = pid % (SPANS_0 + SPANS_1 + SPANS_2)
    tile = pid // (SPANS_0 + SPANS_1 + SPANS_2)
    first_row, rows, slot = _tile(tiles_ptr, tile)
    if (rows == 0) & (tile > 0):  # as in the shrink
        return
    in_1, in_2 = span >= SPANS_0, span >= SPANS_0 + SPANS_1
    index = in_1.to(tl.int32) + in_2.to(tl.int32)
    width = tl.multiple_of(tl.where(in_2, WIDTH_2, tl.where(in_1, WIDTH_1, WIDTH_0)), WIDTH_DIVISOR)
    start = tl.multiple_of(tl.where(in_2, WIDTH_0 + WIDTH_1, tl.where(in_1, WIDTH_0, 0)), WIDTH_DIVISOR)
    span -= tl.where(in_2, SPANS_0 + SPANS_1, tl.where(in_1, SPANS_0, 0))

    entry = table_ptr + slot * table_stride + 2 + 2 * index
    b_ptr = _weights(tl.load(entry), y_ptr.dtype.element_ty)
    rank, column = _rank_and_column(tl.load(entry + 1), index, SLICE_COLUMNS)
    rank = tl.where(rows > 0, rank, 0)

    n = span * SPAN + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    # the first of B is asked for before v, which the shrink may still be writing
    b = _load_b(b_ptr, ranks, rank, n, width)
    if PDL:
        gdc_wait()
    if rank == 0:
        return
    v_ptr += first_row * v_stride_row + column
    y_ptr += first_row * y_stride_row + start
    y_at, mask = _y_block(y_ptr, y_stride_row, rows, n, width, BLOCK_M)
    y = tl.load(y_at, mask=mask, other=0.0)
    v = _sum_splits(v_ptr, num_rows, v_stride_row, rows, ranks, rank, SLICE_COLUMNS, BLOCK_M, SPLIT_K)
    for i in tl.static_range(BLOCKS):
        if i + 1 < BLOCKS:  # ask for the next block before this one is used
            next_n = n + BLOCK_N
            next_b = _load_b(b_ptr, ranks, rank, next_n, width)
            next_at, next_mask = _y_block(y_ptr, y_stride_row, rows, next_n, width, BLOCK_M)
            next_y = tl.load(next_at, mask=next_mask, other=0.0)
        add = _product(v, b, BLOCK_M)
        if MAX_RANK > BLOCK_R:
            for r0 in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                r = r0 + ranks
                more = _sum_splits(v_ptr, num_rows, v_stride_row, rows, r, rank, SLICE_COLUMNS, BLOCK_M, SPLIT_K)
                add += _product(more, _load_b(b_ptr, r, rank, n, width), BLOCK_M)
        tl.store(y_at, (y.to(tl.float32) + add).to(y_ptr.dtype.element_ty), mask=mask)
        if i + 1 < BLOCKS:
            n, b, y, y_at, mask = next_n, next_b, next_y, next_at, next_mask
