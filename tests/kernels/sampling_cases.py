"""What the sampling kernels are tested with, in the interpreter and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

from punica_batch_kernels.sampling import triton_backend
from torch import Tensor

from punica_batch.engine.sampler import SamplingBatch, sample
from punica_batch.types import SamplingParams

FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.01),
    SamplingParams(temperature=20.0, top_k=37),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.7, top_k=100_000),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.3, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=0.999),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=0.8, min_p=0.02, top_k=60, top_p=0.9),
]


def batch_of(params: list[SamplingParams], position: int = 5, job_seed: int = 0) -> SamplingBatch:
    count = len(params)
    return SamplingBatch.build(params, list(range(count)), [0] * count, [position] * count, job_seed)


def check_greedy(logits: Tensor) -> None:
    found = triton_backend.greedy(logits)
    wide = logits.float().cpu().numpy()
    assert found.token_ids.tolist() == wide.argmax(axis=1).tolist(), "numpy takes the first of equals"
    assert found.largest.tolist() == wide.max(axis=1).tolist()
    assert found.finite.all()


def spoil(logits: Tensor) -> tuple[Tensor, list[bool]]:
    """The first rows with NaN or Inf somewhere, and which rows are still finite; one -Inf does no harm."""
    bad = logits.clone()
    vocab = logits.shape[1]
    bad[0, vocab // 2], bad[1, vocab - 1], bad[2], bad[3] = math.nan, math.inf, -math.inf, math.nan
    bad[4, :3] = -math.inf
    return bad, [False] * 4 + [True] * (len(logits) - 4)


def check_draws(
    choose: Callable[[Tensor, SamplingBatch], Tensor], logits: Tensor, params: list[SamplingParams], seeds: int = 3
) -> None:
    """The same tokens as the torch sampler's from the same logits."""
    for seed in range(seeds):
        batch = batch_of(params, position=2**31 * (seed % 2) + seed, job_seed=seed)
        assert choose(logits, batch).tolist() == sample(logits.cpu(), batch).token_ids.tolist()
