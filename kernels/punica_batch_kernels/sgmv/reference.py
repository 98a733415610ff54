"""SGMV in plain torch: the CPU path, the tests' oracle and the benchmarks' baseline.

One matrix product a segment for the shrink, one a segment and slice for the expand, added straight into views of
``y``: each adapter at its own rank. At decode these products take microseconds, so what counts is how few calls
surround them: x, v and y are split into all their views at once. Half-precision inputs accumulate in float32 inside
each product, as ``torch.mm`` does; ``v`` is rounded to its own dtype in between.
"""

from __future__ import annotations

from torch import Tensor

from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights


def sgmv_shrink(v: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> None:
    """v[rows, :rank sum] = x[rows] @ A.T for each segment whose slot holds weights of this group (Punica, section 4).

    ``x`` [T, in_features], ``v`` [T, at least ``group.max_rank_sum``] of x's dtype; both may be strided by row. Nothing
    else in ``v`` is written: columns beyond a segment's own ranks, and rows without an adapter, keep what they held.
    """
    lengths = segments.lengths
    xs, vs = x.split_with_sizes(lengths), v.split_with_sizes(lengths)
    for i, weights in _active(group, segments):
        # beta 0 ignores what v held, NaN included
        vs[i][:, : weights.a.shape[0]].addmm_(xs[i], weights.a_t, beta=0)


def sgmv_expand(y: Tensor, v: Tensor, group: LoraGroup, segments: Segments) -> None:
    """y[rows, slice] += v[rows, slice's ranks] @ B.T for each segment and slice; other rows are left alone.

    ``y`` [T, out_offsets[-1]], ``v`` as ``sgmv_shrink`` leaves it, same dtype; both may be strided by row.
    """
    ys, vs = _slices(y, group, segments), v.split_with_sizes(segments.lengths)
    for i, weights in _active(group, segments):
        _expand(ys, i, vs[i][:, : weights.a.shape[0]], weights)


def add_lora(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments, buffer: Tensor | None = None) -> None:
    """y += (x A.T) B.T: shrink and expand in one pass. ``buffer`` holds v where given, [T, at least max_rank_sum]."""
    if buffer is not None:
        sgmv_shrink(buffer, x, group, segments)
        sgmv_expand(y, buffer, group, segments)
        return
    active = _active(group, segments)
    if active:
        xs, ys = x.split_with_sizes(segments.lengths), _slices(y, group, segments)
        for i, weights in active:
            _expand(ys, i, xs[i].mm(weights.a_t), weights)


def _active(group: LoraGroup, segments: Segments) -> list[tuple[int, SlotWeights]]:
    """(segment, weights) of the segments that add anything here."""
    found = []
    for i, slot in enumerate(segments.lora_indices):
        weights = group.slots[slot] if slot >= 0 else None
        if weights is not None and segments.lengths[i]:
            found.append((i, weights))
    return found


def _slices(y: Tensor, group: LoraGroup, segments: Segments) -> list[tuple[Tensor, ...]]:
    """Views of y: a tuple a slice, one view a segment in it."""
    lengths = segments.lengths
    if len(group.out_offsets) == 2:
        return [y.split_with_sizes(lengths)]
    return [part.split_with_sizes(lengths) for part in y.split_with_sizes(group.out_widths, dim=1)]


def _expand(ys: list[tuple[Tensor, ...]], segment: int, v: Tensor, weights: SlotWeights) -> None:
    if len(ys) == 1:
        if weights.b_t[0] is not None:
            ys[0][segment].addmm_(v, weights.b_t[0])
        return
    for part, y, b in zip(v.split_with_sizes(weights.ranks, dim=1), ys, weights.b_t, strict=True):
        if b is not None:
            y[segment].addmm_(part, b)
