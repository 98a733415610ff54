"""Paged attention in C against a float64 softmax a token; caches are NaN wherever nothing was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import BLOCK, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from punica_batch_kernels.attention import reference
from punica_batch_kernels.native import attention as native
from punica_batch_kernels.native.attention import NativeAttention
from punica_batch_kernels.native.kernels import NativeKernels

BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129)


@pytest.fixture(scope="module")
def attention(native_kernels: NativeKernels) -> NativeAttention:
    return native_kernels.attention


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
def test_block_and_chunk_borders(attention: NativeAttention, heads: int, kv_heads: int, window: int | None) -> None:
    """Whole prompts, second chunks and decodes at and around the borders, mixed in one step."""
    whole = [(n, n) for n in BORDERS]
    chunks = [(5, n) for n in BORDERS if n > 5]
    decodes = [(1, n) for n in BORDERS]
    Case(whole + chunks + decodes, heads, kv_heads).check(window, paged_attention=attention.run)


lengths = st.integers(1, 150).flatmap(lambda kv: st.tuples(st.one_of(st.just(1), st.integers(1, kv)), st.just(kv)))


@given(
    st.lists(lengths, min_size=1, max_size=8),
    st.sampled_from([(4, 4), (9, 3), (3, 1), (7, 1)]),
    st.sampled_from([16, 17, 24, 64, 80, 96, 128, 200, 256]),
    st.one_of(st.none(), st.integers(1, 160)),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_step(
    attention: NativeAttention,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    seed: int,
) -> None:
    case = Case(lengths, *heads, seed=seed, head_dim=head_dim)
    case.check(window, scale=head_dim**-0.5, paged_attention=attention.run)


def test_large_scores_do_not_overflow(attention: NativeAttention) -> None:
    case = Case([(1, 200), (20, 20)], 4, 2)
    case.q *= 100
    got = attention.run(case.q, case.k_cache, case.v_cache, case.meta, scale=1.0, window=None)
    torch.testing.assert_close(got.double(), case.expected(1.0, None), atol=1e-4, rtol=1e-3)


def test_a_rows_result_depends_on_nothing_else(attention: NativeAttention, two_threads: None) -> None:
    """Bit for bit: among others and alone, as a decode and in a prompt, on one thread and on two."""
    case = Case([(1, n) for n in (3, 70, 300, 17)], 9, 3, head_dim=64)
    together = run(attention, case)
    torch.set_num_threads(1)
    assert torch.equal(together, run(attention, case))
    for s, (_, kv) in enumerate(case.lengths):
        alone = Case([(1, kv)], 9, 3, head_dim=64)
        alone.q.copy_(case.q[s : s + 1])
        blocks = torch.from_numpy(alone.meta.block_tables[0]).long()
        slots = blocks.repeat_interleave(BLOCK)[:kv] * BLOCK + torch.arange(kv) % BLOCK
        reference.write_kv(case.keys[s], case.values[s], alone.k_cache, alone.v_cache, slots)
        assert torch.equal(run(attention, alone)[0], together[s])


def test_long_prompts_are_the_references(attention: NativeAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(200, 200), (40, 40), (1, 300)], 4, 2)
    case.check(paged_attention=attention.run)
    plan = attention.plan(case.meta, BLOCK, window=None)
    assert plan.rest is not None
    assert [b.q_len for b in plan.rest.buckets] == [200]
    monkeypatch.setattr(native, "SHORT_KEYS", 1000)
    assert attention.plan(case.meta, BLOCK, window=None).rest is None
    case.check(paged_attention=attention.run)


def test_no_span_is_left_out_and_the_most_work_comes_first(attention: NativeAttention) -> None:
    case = Case([(33, 50), (16, 16), (1, 90), (1, 5)], 4, 2)
    spans = attention.plan(case.meta, BLOCK, window=None).spans.tolist()
    assert sorted(spans) == [
        [0, 16, 18, 0],
        [16, 16, 34, 0],
        [32, 1, 50, 0],
        [33, 16, 1, 1],
        [49, 1, 90, 2],
        [50, 1, 5, 3],
    ]
    work = [rows * keys for _, rows, keys, _ in spans]
    assert work == sorted(work, reverse=True)


def run(attention: NativeAttention, case: Case) -> Any:
    return attention.run(case.q, case.k_cache, case.v_cache, case.meta, scale=0.125, window=None)
