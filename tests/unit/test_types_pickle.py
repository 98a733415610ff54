"""What crosses processes comes out as it went in, and rows that say the same share what says it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from punica_batch.types import Completion, FinishReason, Request, RowResult, SamplingParams, TokenLogprobs

SAMPLING = SamplingParams(
    max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=2**63, stop=("a", "b"), n=2, logprobs=4,
    ignore_eos=True,
)  # fmt: skip
LOGPROBS = TokenLogprobs((-0.5,), (((7, -0.5), (8, -1.5)),))


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(("lora_id", "sampling"), [(None, SamplingParams()), ("billing", SAMPLING)])
def test_requests(lora_id: str | None, sampling: SamplingParams, protocol: int) -> None:
    prompt = np.arange(20, dtype=np.int32)[3:11:2]  # a view that is not contiguous
    request = Request(2**40, prompt, lora_id, sampling)
    other = pickle.loads(pickle.dumps(request, protocol))
    assert (other.row, other.lora_id, other.sampling) == (request.row, lora_id, sampling)
    assert other.prompt_token_ids.dtype == np.int32
    assert other.prompt_token_ids.tolist() == [3, 5, 7, 9]


def test_requests_of_different_messages_share_their_sampling() -> None:
    first, second = (
        pickle.loads(pickle.dumps(Request(row, np.zeros(1, np.int32), "x", SamplingParams(seed=row // 2))))
        for row in (4, 5)
    )
    assert first.sampling is second.sampling


@pytest.mark.parametrize(
    "result",
    [
        RowResult(3, 5, (Completion((1, 2), "ab", FinishReason.STOP),), None, "f" * 64),
        RowResult(4, 5, (Completion((1,), "a", FinishReason.LENGTH, LOGPROBS),) * 2),
        RowResult(5, None, error="empty_prompt: the prompt is empty"),
    ],
)
def test_results(result: RowResult) -> None:
    other = pickle.loads(pickle.dumps(result))
    assert other == result
    assert [type(sample.finish_reason) for sample in other.completions] == [FinishReason] * len(result.completions)
