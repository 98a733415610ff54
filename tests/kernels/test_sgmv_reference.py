"""SGMV's reference against float64 sums written out projection by projection, outputs NaN-filled first."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights
from torch import Tensor

RANKS = (1, 2, 3, 8, 12, 16, 32, 64, 128)
IN_FEATURES = 40
OUT_OFFSETS = (0, 24, 32, 40)  # three slices of different widths, like grouped Q/K/V


def make_slot(ranks: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> SlotWeights | None:
    """Weights of one adapter, as views into one packed buffer; None when every rank is 0."""
    if not any(ranks):
        return None
    widths = [b - a for a, b in pairwise(OUT_OFFSETS)]
    sizes = [sum(ranks) * IN_FEATURES, *(w * r for w, r in zip(widths, ranks, strict=False))]
    packed = (torch.randn(sum(sizes), generator=generator) / math.sqrt(IN_FEATURES)).to(dtype)
    a, *b = packed.split(sizes)
    shaped = [t.view(w, r) if r else None for t, w, r in zip(b, widths, ranks, strict=True)]
    return SlotWeights(a.view(sum(ranks), IN_FEATURES), tuple(shaped), ranks)


def expected(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
    """y with the adapters added, row by row and slice by slice in float64."""
    out = y.double().clone()
    for i, slot in enumerate(segments.lora_indices):
        weights = group.slots[slot] if slot >= 0 else None
        if weights is None:
            continue
        for row in range(segments.seg_indptr[i], segments.seg_indptr[i + 1]):
            column = 0
            for j, b in enumerate(weights.b):
                a = weights.a[column : column + weights.ranks[j]].double()
                column += weights.ranks[j]
                if b is not None:
                    add = torch.einsum("i,ri,or->o", x[row].double(), a, b.double())
                    out[row, group.out_offsets[j] : group.out_offsets[j + 1]] += add
    return out


def make_group(ranks: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> LoraGroup:
    generator = torch.Generator().manual_seed(seed)
    return LoraGroup(IN_FEATURES, OUT_OFFSETS, [make_slot(r, dtype, generator) for r in ranks])


def segments_of(slots_and_rows: list[tuple[int, int]]) -> Segments:
    starts = [0]
    for _, rows in slots_and_rows:
        starts.append(starts[-1] + rows)
    return Segments.build(starts, [slot for slot, _ in slots_and_rows])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("with_buffer", [False, True])
def test_all_ranks_mixed_with_base_rows(dtype: torch.dtype, tolerance: float, with_buffer: bool) -> None:
    group = make_group([(r, r, r) for r in RANKS], dtype)
    segments = segments_of([(-1, 3), *((s, 1 + s % 3) for s in range(len(RANKS))), (-1, 2), (0, 1)])
    rows = segments.seg_indptr[-1]
    x = torch.randn(rows, IN_FEATURES).to(dtype)
    y = torch.randn(rows, OUT_OFFSETS[-1]).to(dtype)
    want = expected(y, x, group, segments)
    before = y.clone()
    buffer = torch.full((rows, group.max_rank_sum), math.nan, dtype=dtype) if with_buffer else None
    reference.add_lora(y, x, group, segments, buffer)
    torch.testing.assert_close(y.double(), want, atol=tolerance, rtol=tolerance)
    assert torch.equal(y[:3], before[:3]), "base rows are not touched"
    assert not torch.equal(y[3:5], before[3:5]), "adapter rows are"


@given(
    ranks=st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 3, 8, 12])] * 3), min_size=1, max_size=5),
    data=st.data(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_segments_and_subsets(ranks: list[tuple[int, ...]], data: st.DataObject, seed: int) -> None:
    """Empty segments, repeated slots, slots without the group, slices of rank 0; x, v and y strided by row."""
    group = make_group(ranks, seed=seed)
    layout = data.draw(st.lists(st.tuples(st.integers(-1, len(ranks) - 1), st.integers(0, 4)), max_size=8))
    segments = segments_of(layout)
    rows = segments.seg_indptr[-1]
    x = torch.randn(rows, IN_FEATURES + 7)[:, 3 : 3 + IN_FEATURES]
    y = torch.randn(rows, OUT_OFFSETS[-1] + 5)[:, 5:]
    v = torch.full((rows, group.max_rank_sum + 4), math.nan)[:, : group.max_rank_sum + 1]
    want = expected(y, x, group, segments)
    reference.sgmv_shrink(v, x, group, segments)
    reference.sgmv_expand(y, v, group, segments)
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        [(0, 1), (1, 60), (2, 1), (-1, 2)],  # skewed
        [(s, 16) for s in range(4)],  # uniform
        [(s % 4, 1) for s in range(64)],  # a row each
        [(3, 64)],  # all of one
        [(0, 5), (0, 3), (1, 7), (0, 2)],  # an adapter that comes back
        [(-1, 64)],  # none
        [(0, 0), (-1, 0), (2, 4), (1, 0)],  # empty segments
    ],
    ids=["skewed", "uniform", "distinct", "identical", "returning", "base", "empty"],
)
def test_popularities(layout: list[tuple[int, int]]) -> None:
    group = make_group([(16, 16, 16), (64, 0, 64), (3, 12, 1), (0, 128, 0)])
    segments = segments_of(layout)
    rows = segments.seg_indptr[-1]
    x, y = torch.randn(rows, IN_FEATURES), torch.randn(rows, OUT_OFFSETS[-1])
    want = expected(y, x, group, segments)
    reference.add_lora(y, x, group, segments)
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=1e-5)


def test_shrink_computes_only_the_true_rank() -> None:
    group = make_group([(2, 0, 3), (8, 8, 8)])
    segments = segments_of([(0, 2), (-1, 1), (1, 1)])
    v = torch.full((4, group.max_rank_sum), math.nan)
    reference.sgmv_shrink(v, torch.randn(4, IN_FEATURES), group, segments)
    assert torch.isfinite(v[:2, :5]).all()
    assert torch.isnan(v[:2, 5:]).all(), "columns beyond the adapter's own rank are not computed"
    assert torch.isnan(v[2]).all(), "base rows are not computed"
    assert torch.isfinite(v[3]).all()


@pytest.mark.parametrize(
    ("starts", "slots"), [([1, 2], [0]), ([0, 2], [0, 1]), ([0, 3, 2], [0, 1])], ids=["start", "count", "falling"]
)
def test_bad_segments_are_refused(starts: list[int], slots: list[int]) -> None:
    with pytest.raises(ValueError, match="seg_indptr"):
        Segments.build(starts, slots)
