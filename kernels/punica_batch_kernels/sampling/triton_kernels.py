"""Triton kernels that choose tokens: argmax over split rows, and the Gumbel race with its filters, a program a row.

Noise is Philox4x32-10 (Salmon et al. 2011), four tokens a counter; what decides is float64, as in the torch code, so
that both choose the same token. Logits are read as they are, in half precision or float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["span"])
def argmax_split_kernel(
    logits_ptr,  # [R, V]
    best_ptr,  # float32 [R, splits]: the largest of a split, NaN where it holds one
    index_ptr,  # int32 [R, splits]: its lowest token
    stride_row,
    span,  # tokens a split, a multiple of BLOCK
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    logits_ptr += row.to(tl.int64) * stride_row
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, span, BLOCK):
        token = split * span + start + lanes
        x = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        nan |= (x != x).to(tl.int32)
        better = x > best  # never true of NaN
        best = tl.where(better, x, best)
        index = tl.where(better, token, index)
    top = tl.max(best)
    place = row * tl.num_programs(1) + split
    tl.store(index_ptr + place, tl.min(tl.where(best == top, index, V)))
    tl.store(best_ptr + place, tl.where(tl.max(nan) > 0, float("nan"), top))


@triton.jit(do_not_specialize=["splits"])
def argmax_join_kernel(
    best_ptr,  # float32 [R, splits]
    index_ptr,  # int32 [R, splits]
    tokens_ptr,  # int64 [R]
    finite_ptr,  # bool [R]
    largest_ptr,  # float32 [R]
    splits,
    MAX_SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.arange(0, MAX_SPLITS)
    best = tl.load(best_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    index = tl.load(index_ptr + row * splits + split, mask=split < splits, other=0x7FFFFFFF)
    nan = best != best
    best = tl.where(nan, float("-inf"), best)
    top = tl.max(best)
    tl.store(tokens_ptr + row, tl.min(tl.where(best == top, index, 0x7FFFFFFF)).to(tl.int64))
    tl.store(finite_ptr + row, (tl.max(nan.to(tl.int32)) == 0) & (tl.abs(top) < float("inf")))
    tl.store(largest_ptr + row, top)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """int32 in the order of the float32 numbers x, equals alike; SHIFT: how many low bits say nothing, for x was half
    precision."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _weight_above(
    row_ptr, thresholds, top, inverse, least, floor,
    V: tl.constexpr, SHIFT: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each threshold the weight, float64, of the tokens whose keys are above it, of those not below ``least`` nor
    ``floor``; a token weighs exp(s), or 1 without MASS."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([thresholds.shape[0], BLOCK], tl.float64)
    for start in range(0, V, BLOCK):
        token = start + lanes
        x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        key = _key(x, SHIFT)
        wide = x.to(tl.float64)
        counted = (token < V) & (key >= floor) & (wide >= least)
        if MASS:
            weight = tl.where(counted, tl.exp((wide - top) * inverse), 0.0)
        else:
            weight = tl.where(counted, 1.0, 0.0).to(tl.float64)
        total += tl.where(key[None, :] > thresholds[:, None], weight[None, :], 0.0)
    return tl.sum(total, axis=1)


@triton.jit
def _last_kept(
    row_ptr, top, inverse, least, floor, needed,
    V: tl.constexpr, SHIFT: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least key from ``floor`` on above which less than ``needed`` lies: that of the last token that top-k or
    top-p keeps. Eight ways a pass."""
    low = floor.to(tl.int64)
    high = _key(top.to(tl.float32), SHIFT).to(tl.int64)
    ways = tl.arange(0, 8).to(tl.int64)
    while low < high:
        width = high - low
        thresholds = (low + width * ways // 8).to(tl.int32)
        above = _weight_above(row_ptr, thresholds, top, inverse, least, floor, V, SHIFT, MASS, BLOCK)
        enough = tl.sum((above >= needed).to(tl.int64))
        new_low = tl.where(enough > 0, low + width * (enough - 1) // 8 + 1, low)
        high = tl.where(enough < 8, low + width * enough // 8, high)
        low = new_low
    return low.to(tl.int32)


@triton.jit
def draw_kernel(
    logits_ptr,  # [R, V]
    largest_ptr,  # float32 [R]
    finite_ptr,  # bool [R]
    numbers_ptr,  # int64 [4, D]: row, top_k, key, position
    shares_ptr,  # float64 [3, D]: temperature, min_p, top_p
    tokens_ptr,  # int64 [R]
    stride_row,
    V: tl.constexpr,
    SHIFT: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of one drawn row. A row that is not finite keeps the one it has."""
    pid, count = tl.program_id(0), tl.num_programs(0)
    row = tl.load(numbers_ptr + pid)
    if not tl.load(finite_ptr + row):
        return
    top_k = tl.load(numbers_ptr + count + pid)
    stream = tl.load(numbers_ptr + 2 * count + pid)
    position = tl.load(numbers_ptr + 3 * count + pid).to(tl.int32)
    temperature = tl.load(shares_ptr + pid)
    min_p = tl.load(shares_ptr + count + pid)
    top_p = tl.load(shares_ptr + 2 * count + pid)
    row_ptr = logits_ptr + row * stride_row
    narrow_top = tl.load(largest_ptr + row)
    top = narrow_top.to(tl.float64)
    inverse = 1.0 / temperature
    least = top + temperature * tl.log(min_p)  # -inf where min_p is 0
    nothing = tl.full([], float("-inf"), tl.float64)
    # below the key of -inf, and with room for one less
    floor = tl.full([], 1 - (0x80000000 >> SHIFT), tl.int32)
    if top_k > 0:
        floor = _last_kept(row_ptr, top, inverse, nothing, floor, top_k.to(tl.float64), V, SHIFT, False, BLOCK)
    if top_p < 1.0:
        everything = tl.zeros([1], tl.int32) + floor - 1
        mass = _weight_above(row_ptr, everything, top, inverse, least, floor, V, SHIFT, True, BLOCK)
        floor = _last_kept(row_ptr, top, inverse, least, floor, top_p * tl.sum(mass), V, SHIFT, True, BLOCK)
    # no noise lifts a token from further down past the likeliest one
    least = tl.maximum(least, top - SPAN * temperature)
    token = _race(row_ptr, narrow_top, temperature, least, floor, stream, position, V, SHIFT, BLOCK)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def _race(
    row_ptr, narrow_top, temperature, least, floor, stream, position,
    V: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """argmax over the kept tokens of s + gumbel, s = (logit - top) / temperature, the lowest of equals.

    With u a token's uniform, gumbel = -log(-log u) <= -log(1 - u): a float32 bound, one logarithm, tells the blocks in
    which no token can win from the few whose scores are computed exactly.
    """
    top = narrow_top.to(tl.float64)
    narrow_inverse = (1.0 / temperature).to(tl.float32)
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], V - 1, tl.int32)
    groups = tl.arange(0, BLOCK // 4)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        group = start // 4 + groups
        zero = group * 0
        w0, w1, w2, w3 = tl.philox(stream, group, zero + position, zero, zero)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
        token = start + lanes
        x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        wide = x.to(tl.float64)
        kept = (token < V) & (_key(x, SHIFT) >= floor) & (wide >= least)
        rest = ((0xFFFFFFFF - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
        bound = tl.where(kept, (x - narrow_top) * narrow_inverse - tl.log(rest), float("-inf"))
        # much more than float32 gets wrong of the bound
        if tl.max(bound) + 1e-3 >= best.to(tl.float32):
            uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
            score = tl.where(kept, (wide - top) / temperature - tl.log(-tl.log(uniform)), float("-inf"))
            highest = tl.max(score)
            if highest > best:
                winner = tl.min(tl.where(score == highest, token, V))
                best = highest
    return winner
