"""The product of few rows with a weight matrix: all that counts is how fast the weights are read.

The products of all tiles of the output, ``BLOCK_K`` of K at a time, are one sequence of blocks, tile after tile. Each
program takes an equal share of it: a tile, an equal part of one (split K), or whatever lies between its ends, so that
any number of programs have the same to read ("stream-K": Osama et al. 2023, section 4). Where a tile is shared,
each of its programs leaves a partial sum in float32, and the one that comes last adds them all, its own too, in the
order of K: the sum's bits do not depend on which one that was.

With ``PDL`` (Hopper's programmatic dependent launch) a program starts while the kernel before this one still runs, and
has the first of its weights brought into the L2 cache before it waits. That changes nothing even if that kernel should
write them: the L2 cache is where all multiprocessors meet.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _prefetch(
    weight_ptr, tile, block, out_features,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Brings ``COLUMNS`` of K of a tile's weights, from a block on, into the L2 cache, 128 bytes at a time."""
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), out_features - 1)
    k = tl.minimum(block * BLOCK_K + tl.arange(0, COLUMNS // LINE) * LINE, K - 1)
    lines = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _write(
    acc, y_ptr, bias_ptr, tile, rows, out_features, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """A tile's finished sums to y, rounded once."""
    if TRANSPOSED:
        acc = tl.trans(acc)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < rows)[:, None] & (n < out_features)[None, :]
    at = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _place(program, tile, blocks, total, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Where a program's partial sums of a tile are: it has two places, as its share may end in another tile."""
    if TRANSPOSED:
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    else:
        at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    begins = (program * total) // tl.num_programs(0)
    return (2 * program + (begins < tile * blocks).to(tl.int32)) * (BLOCK_M * BLOCK_N) + at


@triton.jit
def _programs_of(tile, blocks, total):
    """The first and the last program of a tile's: a block's program is the last one to begin at or before it."""
    programs = tl.num_programs(0)
    return ((tile * blocks + 1) * programs - 1) // total, ((tile + 1) * blocks * programs - 1) // total


@triton.jit
def _combine(
    y_ptr, partials_ptr, bias_ptr, counters_ptr, tile, blocks, total, rows, out_features, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Counts a program's partial sums of a tile as there; who finds that they all are adds them."""
    first_program, last_program = _programs_of(tile, blocks, total)
    if first_program < last_program:
        tl.debug_barrier()  # all of the program's stores come before the count that announces them
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived == last_program - first_program:
            place = _place(first_program, tile, blocks, total, BLOCK_M, BLOCK_N, TRANSPOSED)
            acc = tl.load(partials_ptr + place, cache_modifier=".cg")
            for program in range(first_program + 1, last_program + 1):
                place = _place(program, tile, blocks, total, BLOCK_M, BLOCK_N, TRANSPOSED)
                acc += tl.load(partials_ptr + place, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)  # for the next launch
            _write(
                acc, y_ptr, bias_ptr, tile, rows, out_features, y_stride,
                BLOCK_M, BLOCK_N, TRANSPOSED, BIAS, ACCUMULATE,
            )  # fmt: skip


@triton.jit
def _multiply(
    acc, x_ptr, weight_ptr, tile, block, rows, out_features, x_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """acc plus one block's product."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    m = tl.arange(0, BLOCK_M)
    # rows beyond the last are read twice rather than masked, and never written
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), out_features - 1).to(tl.int64)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + n[:, None] * K + k[None, :]
    if EVEN_K:
        x = tl.load(x_at, mask=(m < rows)[:, None], other=0.0)
        weight = tl.load(weight_at)
    else:
        x = tl.load(x_at, mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
        weight = tl.load(weight_at, mask=(k < K)[None, :], other=0.0)
    if TRANSPOSED:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["bias_ptr", "counters_ptr"],
)
def few_rows_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [out_features, K], contiguous
    y_ptr,  # [rows, out_features]
    partials_ptr,  # float32 [programs, 2, BLOCK_M * BLOCK_N]; any where no tile is shared
    bias_ptr,  # [out_features]; any without BIAS
    counters_ptr,  # int32 [tiles], zeros, and zeros again at the end
    rows,
    out_features,
    x_stride,
    y_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # which of the two has the side that tensor cores have 64 of at a time: the weights
    SHARED: tl.constexpr,  # whether programs share tiles
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns of K brought to the L2 cache ahead of the wait
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x weight^T + bias, or y += that; at most ``BLOCK_M`` rows."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    total = tl.cdiv(out_features, BLOCK_N) * blocks
    if SHARED:
        first = (pid * total) // tl.num_programs(0)
        last = ((pid + 1) * total) // tl.num_programs(0)
    else:
        first = pid * blocks
        last = first + blocks
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch(weight_ptr, first // blocks, first % blocks, out_features, K, BLOCK_N, BLOCK_K, PREFETCH)
        gdc_wait()

    if TRANSPOSED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SHARED:
        for i in tl.range(first, last, num_stages=STAGES):
            tile = i // blocks
            acc = _multiply(
                acc, x_ptr, weight_ptr, tile, i % blocks, rows, out_features, x_stride,
                K, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED,
            )  # fmt: skip
            if (i % blocks == blocks - 1) | (i == last - 1):
                first_program, last_program = _programs_of(tile, blocks, total)
                if first_program == last_program:
                    _write(
                        acc, y_ptr, bias_ptr, tile, rows, out_features, y_stride,
                        BLOCK_M, BLOCK_N, TRANSPOSED, BIAS, ACCUMULATE,
                    )  # fmt: skip
                else:
                    place = _place(pid, tile, blocks, total, BLOCK_M, BLOCK_N, TRANSPOSED)
                    tl.store(partials_ptr + place, acc)
                acc = tl.zeros_like(acc)
        # counting is no work for the loop: a barrier in it would keep its loads from being under way side by side
        _combine(
            y_ptr, partials_ptr, bias_ptr, counters_ptr, first // blocks, blocks, total, rows, out_features, y_stride,
            BLOCK_M, BLOCK_N, TRANSPOSED, BIAS, ACCUMULATE,
        )  # fmt: skip
        if (last - 1) // blocks > first // blocks:
            _combine(
                y_ptr, partials_ptr, bias_ptr, counters_ptr, (last - 1) // blocks, blocks, total,
                rows, out_features, y_stride, BLOCK_M, BLOCK_N, TRANSPOSED, BIAS, ACCUMULATE,
            )  # fmt: skip
    else:
        for block in tl.range(0, blocks, num_stages=STAGES):
            acc = _multiply(
                acc, x_ptr, weight_ptr, pid, block, rows, out_features, x_stride,
                K, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED,
            )  # fmt: skip
        _write(
            acc, y_ptr, bias_ptr, pid, rows, out_features, y_stride,
            BLOCK_M, BLOCK_N, TRANSPOSED, BIAS, ACCUMULATE,
        )  # fmt: skip
