"""The sampler on a GPU: the CPU's tokens from the same logits, no wait for the device, greedy in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from sampling_cases import FILTERS, batch_of, check_draws, check_greedy, spoil

from punica_batch.engine.sampler import SamplingBatch, greedy, sample
from punica_batch.types import SamplingParams

CUDA = torch.device("cuda")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rand(rows: int, vocab: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(rows + vocab)
    return (torch.randn(rows, vocab, generator=generator, device=CUDA) * scale).to(dtype)


def choose(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return sample(logits, batch).token_ids.cpu()


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 97, 32_000, 128_256, 151_936])
@pytest.mark.parametrize("rows", [1, 7, 32, 256, 512])
def test_greedy(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """In bfloat16 the largest of a row is seldom alone."""
    check_greedy(rand(rows, vocab, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("params", FILTERS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_draws_are_the_cpus(params: SamplingParams, dtype: torch.dtype) -> None:
    for rows, vocab, scale in ((4, 31, 3.0), (8, 32_000, 0.5), (4, 32_000, 4.0), (2, 151_936, 2.5)):
        check_draws(choose, rand(rows, vocab, dtype, scale), [params] * rows, seeds=1)


def test_a_large_mixed_batch() -> None:
    params = [SamplingParams(temperature=0.0), *FILTERS] * 12
    check_draws(choose, rand(len(params), 32_000, torch.float16, 3.0), params, seeds=1)


def test_ties_at_the_border_are_kept() -> None:
    logits = torch.zeros(8, 3000, device=CUDA)
    logits[:, ::2] = 0.5
    logits[:, 1::4] = -0.0  # equals 0.0
    for params in (SamplingParams(temperature=1.0, top_p=0.3), SamplingParams(temperature=1.0, top_k=1501)):
        check_draws(choose, logits, [params] * 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite(temperature: float) -> None:
    logits, finite = spoil(rand(8, 32_000, torch.float16))
    batch = batch_of([SamplingParams(temperature=temperature, top_p=0.9, top_k=50)] * 8)
    out = sample(logits, batch)
    assert out.finite.tolist() == finite
    assert all(0 <= token < 32_000 for token in out.token_ids.tolist())
    harmless = torch.cat([torch.zeros(4, 32_000).half(), logits[4:].cpu()])
    assert out.token_ids[4:].tolist() == sample(harmless, batch).token_ids[4:].tolist()


def test_nothing_waits_for_the_device(no_waiting: None) -> None:
    params = [SamplingParams(temperature=0.0), *FILTERS, SamplingParams(temperature=1.0, logprobs=5)]
    logits = torch.zeros(len(params), 32_000, device=CUDA, dtype=torch.float16)
    out = sample(logits, batch_of(params))
    greedy(logits)
    torch.cuda.set_sync_debug_mode("default")
    assert out.finite.all()


def test_logprobs_are_the_cpus() -> None:
    params = [SamplingParams(temperature=i % 2, logprobs=i % 3 or None) for i in range(12)]
    logits = rand(12, 32_000, torch.float16, 2.0)
    got, want = sample(logits, batch_of(params)), sample(logits.cpu(), batch_of(params))
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.chosen_logprobs is not None
    assert got.top_logprobs is not None
    torch.testing.assert_close(got.chosen_logprobs.cpu(), want.chosen_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.top_logprobs.cpu(), want.top_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_greedy_in_a_graph(rows: int) -> None:
    logits = rand(rows, 32_000, torch.bfloat16)
    greedy(logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids, finite = greedy(logits)
    for _ in range(3):
        logits.copy_(torch.randn_like(logits, dtype=torch.float32))
        logits[0, 5] = torch.inf
        graph.replay()
        assert token_ids[1:].tolist() == [int((row == row.max()).nonzero()[0]) for row in logits[1:]]
        assert finite.tolist() == [False] + [True] * (rows - 1)
