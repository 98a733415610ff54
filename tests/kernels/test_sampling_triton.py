"""The sampling kernels against the torch sampler, which has tests of its own, in Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when it is imported: the file runs itself in a process of its own.
"""

from __future__ import annotations

import math

import pytest
import torch
from interpreter import INTERPRETED, run_in_interpreter

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

else:
    from punica_batch_kernels.sampling import triton_backend
    from sampling_cases import FILTERS, batch_of, check_draws, check_greedy, spoil

    from punica_batch.engine.sampler import SamplingBatch, sample, sample_on_device
    from punica_batch.types import SamplingParams

    CPU = torch.device("cpu")

    def choose(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sample_on_device(logits, batch.to(CPU)).token_ids

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 97), (2, 5000), (1, 40_000)])
    def test_greedy(rows: int, vocab: int, dtype: torch.dtype) -> None:
        check_greedy(torch.randn(rows, vocab + 5).to(dtype)[:, :vocab])

    def test_greedy_takes_the_lowest_of_equals_across_splits() -> None:
        logits = torch.zeros(2, 9000)
        logits[0, [2047, 2048, 8999]] = 1.0
        found = triton_backend.greedy(logits)
        assert found.token_ids.tolist() == [2047, 0]
        assert found.largest.tolist() == [1.0, 0.0]

    def test_rows_that_are_not_finite() -> None:
        logits, finite = spoil(torch.randn(6, 5000))
        found = triton_backend.greedy(logits)
        assert found.finite.tolist() == finite
        assert all(0 <= token < 5000 for token in found.token_ids.tolist())
        batch = batch_of([SamplingParams(temperature=1.0, top_p=0.9, top_k=9)] * 6)
        token_ids = choose(logits, batch)
        want = sample(logits, batch).token_ids
        assert [token_ids[i] for i in range(6) if finite[i]] == [want[i] for i in range(6) if finite[i]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("params", FILTERS, ids=str)
    def test_draws_are_the_torch_samplers(params: SamplingParams, dtype: torch.dtype) -> None:
        for vocab, scale in ((1, 1.0), (31, 3.0), (2501, 2.0)):
            logits = (torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)) * scale).to(dtype)
            check_draws(choose, logits, [params] * 2, seeds=2)

    def test_ties_at_the_border_are_kept() -> None:
        logits = torch.zeros(8, 3000)
        logits[:, ::2] = 0.5
        logits[:, 1::4] = -0.0  # equals 0.0
        for params in (SamplingParams(temperature=1.0, top_p=0.3), SamplingParams(temperature=1.0, top_k=1501)):
            check_draws(choose, logits, [params] * 8, seeds=1)

    def test_greedy_and_drawn_rows_side_by_side() -> None:
        logits = torch.randn(9, 300)
        mixed = [SamplingParams(temperature=(0.0, 1.0, 2.0)[i % 3], logprobs=(None, 4)[i % 2]) for i in range(9)]
        batch = batch_of(mixed)
        got, want = sample_on_device(logits, batch.to(CPU)), sample(logits, batch)
        for ours, theirs in zip(
            (got.token_ids, got.finite, got.chosen_logprobs, got.top_ids, got.top_logprobs),
            (want.token_ids, want.finite, want.chosen_logprobs, want.top_ids, want.top_logprobs),
            strict=True,
        ):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)

    def test_nothing_sampled() -> None:
        found = triton_backend.greedy(torch.randn(0, 10))
        assert found.token_ids.shape == (0,)
        assert not math.isnan(float(found.largest.sum()))
