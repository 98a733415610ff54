"""Paged attention's reference against a float64 softmax per token; caches are NaN wherever nothing was written."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import BLOCK, HEAD_DIM, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from punica_batch_kernels.attention import reference

BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_block_borders(heads: int, kv_heads: int, window: int | None) -> None:
    """Whole prompts, second chunks, and decodes at and around the block borders, mixed in one step."""
    whole = [(n, n) for n in BORDERS]
    chunks = [(5, n) for n in BORDERS if n > 5]
    decodes = [(1, n) for n in BORDERS]
    Case(whole + chunks + decodes, heads, kv_heads).check(window)


lengths = st.integers(1, 70).flatmap(lambda kv: st.tuples(st.integers(1, kv), st.just(kv)))


@given(
    st.lists(lengths, min_size=1, max_size=12),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.one_of(st.none(), st.integers(1, 80)),
    st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_any_step(lengths: list[tuple[int, int]], heads: tuple[int, int], window: int | None, seed: int) -> None:
    Case(lengths, *heads, seed=seed).check(window)


def test_very_different_lengths_are_not_padded_to_one_another() -> None:
    case = Case([(1, n) for n in [1, 2, 3, 600, 610, 620]] + [(400, 400), (3, 3), (4, 4)], 2, 1)
    case.check()
    plan = reference.plan_attention(case.meta, BLOCK, window=None)
    assert sorted((b.batch, b.q_len, b.kv_len) for b in plan.buckets) == [
        (1, 400, 400),
        (2, 4, 4),
        (3, 1, 3),
        (3, 1, 620),
    ]


@pytest.mark.parametrize(("name", "bound"), [("BUCKET_AREA", 1000), ("BUCKET_KEYS", 50)])
def test_buckets_are_bounded(name: str, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(20, 20)] * 9 + [(1, 20)] * 9, 2, 1)
    monkeypatch.setattr(reference, name, bound)
    plan = reference.plan_attention(case.meta, BLOCK, window=None)
    size = {"BUCKET_AREA": lambda b: b.batch * b.q_len * b.kv_len, "BUCKET_KEYS": lambda b: b.batch * b.kv_len}[name]
    assert max(size(b) for b in plan.buckets) <= bound
    assert sum(b.batch for b in plan.buckets) == 18
    case.check()


@pytest.mark.parametrize("length", [15, 16, 17, 18])
def test_a_whole_prompt_at_the_windows_edge(length: int) -> None:
    Case([(length, length)], 2, 1).check(window=16)


def test_a_window_gathers_only_the_blocks_it_sees() -> None:
    case = Case([(1, 320), (1, 319)], 2, 2)
    plan = reference.plan_attention(case.meta, BLOCK, window=20)
    assert len(plan.buckets) == 1
    assert plan.buckets[0].kv_len <= 3 * BLOCK
    case.check(window=20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_within_its_rounding(dtype: torch.dtype) -> None:
    case = Case([(20, 20), (20, 33), (1, 17), (1, 40)], 4, 2)
    case.q, case.k_cache, case.v_cache = case.q.to(dtype), case.k_cache.to(dtype), case.v_cache.to(dtype)
    got = reference.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=0.3, window=None)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), case.expected(0.3, None), atol=5e-2, rtol=5e-2)


def test_a_cache_of_another_dtype_is_converted() -> None:
    case = Case([(20, 20), (1, 17)], 4, 2)
    case.k_cache, case.v_cache = case.k_cache.bfloat16(), case.v_cache.bfloat16()
    got = reference.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=0.3, window=None)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), case.expected(0.3, None), atol=3e-2, rtol=3e-2)


def test_write_kv_takes_views_of_a_fused_projection() -> None:
    fused = torch.randn(3, 4 * HEAD_DIM)
    k, v = fused[:, : 2 * HEAD_DIM].view(3, 2, HEAD_DIM), fused[:, 2 * HEAD_DIM :].view(3, 2, HEAD_DIM)
    k_cache, v_cache = (torch.full((2, BLOCK, 2, HEAD_DIM), math.nan) for _ in range(2))
    slots = torch.tensor([BLOCK + 3, 0, 7])
    reference.write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(-1, 2, HEAD_DIM)[slots], k)
    assert torch.equal(v_cache.view(-1, 2, HEAD_DIM)[slots], v)
    assert int(torch.isnan(k_cache).any(-1).any(-1).sum()) == 2 * BLOCK - 3, "no other slot is written"
