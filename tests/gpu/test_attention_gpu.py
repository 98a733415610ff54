"""FlashInfer's paged attention against a float64 softmax a token; caches are NaN wherever nothing was written.

The first run on a machine compiles kernels for some minutes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from attention_cases import BLOCK, Case
from punica_batch_kernels.attention.types import AttentionShape
from punica_batch_kernels.backend import Kernels, kernels_for

CUDA = torch.device("cuda")
FP16, BF16 = torch.float16, torch.bfloat16
HEADS = {"mha": (4, 4), "pairs": (4, 2), "fours": (8, 2), "sevens": (14, 2)}
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49)
MIXES = {
    "decode": [*((1, n) for n in BORDERS), (1, 700), (1, 3000)],
    "prefill": [*((n, n) for n in BORDERS[1:]), (300, 300)],
    "chunked": [*((5, n) for n in BORDERS if n > 5), (40, 900), (2, 3000)],
    "mixed": [*((n, n) for n in BORDERS[1:]), (7, 100), (33, 200), *((1, n) for n in BORDERS), (1, 1000)],
}


@cache
def kernels(heads: str, head_dim: int, dtype: torch.dtype, window: int | None) -> Kernels:
    return kernels_for(CUDA, dtype, AttentionShape(*HEADS[heads], head_dim, frozenset({window})))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, FP16), (64, BF16), (128, FP16), (128, BF16)])
def test_flashinfer(head_dim: int, dtype: torch.dtype, heads: str, mix: str) -> None:
    found = kernels(heads, head_dim, dtype, None)
    assert found.note is None
    case = Case(MIXES[mix], *HEADS[heads], head_dim=head_dim, dtype=dtype, device="cuda")
    case.check(scale=head_dim**-0.5, paged_attention=found.paged_attention)
    case.check(scale=0.2, paged_attention=found.paged_attention)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 100, 5000])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", ["mha", "fours"])
def test_windows(heads: str, mix: str, window: int) -> None:
    found = kernels(heads, 64, FP16, window)
    assert found.note is None
    case = Case(MIXES[mix], *HEADS[heads], head_dim=64, dtype=FP16, device="cuda")
    case.check(window, scale=0.125, paged_attention=found.paged_attention)


def test_a_plan_serves_all_layers_beside_another_windows() -> None:
    shape = AttentionShape(4, 4, 64, frozenset({None, 16}))
    found = kernels_for(CUDA, FP16, shape)
    case = Case(MIXES["mixed"], 4, 4, head_dim=64, dtype=FP16, device="cuda")
    plans = {w: found.plan_attention(case.meta, BLOCK, window=w) for w in (None, 16)}
    for window in (None, 16, None, 16):
        got = found.paged_attention(
            case.q, case.k_cache, case.v_cache, case.meta, scale=0.1, window=window, plan=plans[window]
        )
        torch.testing.assert_close(got.double().cpu(), case.expected(0.1, window), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(("heads", "kv_heads", "decodes"), [(32, 1, 100), (32, 2, 2048), (48, 2, 1100)])
def test_graphs_of_few_key_heads_and_many_rows_have_room_to_split(heads: int, kv_heads: int, decodes: int) -> None:
    found = kernels_for(CUDA, FP16, AttentionShape(heads, kv_heads, 64, max_num_seqs=decodes))
    lengths = [(222, 300), *[(2, 40)] * 17, *[(1, 3)] * decodes]  # the largest prefill of a graph beside them
    case = Case(lengths, heads, kv_heads, head_dim=64, dtype=FP16, device="cuda")
    meta = replace(case.meta, capacity=case.k_cache.shape[0])
    plan = found.plan_attention(meta, BLOCK, window=None)
    got = found.paged_attention(case.q, case.k_cache, case.v_cache, meta, scale=0.1, window=None, plan=plan)
    torch.testing.assert_close(got.double().cpu(), case.expected(0.1, None), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_what_flashinfer_cannot_do_runs_in_torch(mix: str, window: int | None) -> None:
    for dtype, head_dim in ((torch.float32, 64), (FP16, 40)):
        found = kernels("pairs", head_dim, dtype, window)
        assert "plain torch" in str(found.note)
        case = Case(MIXES[mix], *HEADS["pairs"], head_dim=head_dim, dtype=dtype, device="cuda")
        case.check(window, scale=0.1, paged_attention=found.paged_attention)
