"""What the engine generates: as Hugging Face does greedily, and the same whatever the batch, cache, slots and order."""

from __future__ import annotations

import random

import numpy as np
import parity_tools as tools
import pytest
import torch
from parity_tools import ARCHITECTURES, BOS, TinyModel
from torch import Tensor

from punica_batch.types import Completion, FinishReason, Request, SamplingParams

ADAPTERS = ["a", "a", None, "b", "a", "c", "d", "e", None, "f", "b", "g"]
PROMPTS = [15, 16, 17, 32, 33, 1, 5, 40, 8, 21, 2, 64]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    torch.set_num_threads(1)
    model = TinyModel.make(tmp_path_factory.mktemp("llama31"), ARCHITECTURES["llama31"], seed=17)
    for i, (name, rank) in enumerate(zip("abcdefg", (1, 4, 8, 12, 3, 16, 64), strict=True)):
        model.add_adapter(name, seed=70 + i, r=rank)
    return model


def rows() -> list[tuple[str | None, list[int]]]:
    return tools.random_rows(ADAPTERS, PROMPTS, seed=21)


def requests(**sampling: object) -> list[Request]:
    return tools.requests_of(rows(), **{"max_tokens": NEW_TOKENS, "ignore_eos": True} | sampling)


@pytest.fixture(scope="module")
def greedy(tiny: TinyModel) -> dict[int, list[int]]:
    """Every row run alone."""
    engine = tiny.engine(max_num_seqs=1)
    return {r.row: tools.tokens(tools.generate(engine, [r])[r.row])[0] for r in requests()}


def same_up_to_near_ties(tiny: TinyModel, ours: dict[int, list[int]], theirs: dict[int, list[int]]) -> None:
    """Equal, or parted at a token that Hugging Face's own logits could not tell from the other."""
    for row, (lora_id, prompt) in enumerate(rows()):
        if ours[row] != theirs[row]:
            first = next(i for i, (a, b) in enumerate(zip(ours[row], theirs[row], strict=True)) if a != b)
            given = [(lora_id, prompt + theirs[row][:first])]
            last: Tensor = tiny.reference(given)[0][-1]
            gap = float(last.max() - last[ours[row][first]])
            assert gap <= tiny.tolerance(given), f"row {row} parts at token {first}, {gap} apart"


def test_greedy_is_hugging_faces(tiny: TinyModel, greedy: dict[int, list[int]]) -> None:
    theirs: dict[int, list[int]] = {}
    with tiny.hf_model() as answer, torch.no_grad():
        for row, (lora_id, prompt) in enumerate(rows()):
            ids = list(prompt)
            for _ in range(NEW_TOKENS):
                ids.append(int(answer(lora_id, torch.tensor([ids]))[0, -1].argmax()))
            theirs[row] = ids[len(prompt) :]
    same_up_to_near_ties(tiny, greedy, theirs)
    assert len({tuple(ids) for ids in theirs.values()}) == len(theirs)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one batch"),
        pytest.param({"max_num_batched_tokens": 19, "max_num_seqs": 12}, id="chunked"),
        pytest.param({"num_blocks": 11, "block_size": 8, "max_model_len": 88}, id="preempted"),
        pytest.param({"num_blocks": 88, "block_size": 1, "max_model_len": 88}, id="blocks of one"),
        pytest.param({"max_loras": 1}, id="one slot for seven adapters"),
        pytest.param({"max_loras": 2, "num_blocks": 14, "block_size": 8, "read_ahead": 1}, id="two slots, preempted"),
        pytest.param({"max_num_seqs": 3}, id="three at a time"),
        pytest.param({"max_num_seqs": 1, "max_num_batched_tokens": 7}, id="one at a time, steps that sample nothing"),
    ],
)
def test_any_batch_gives_what_a_row_alone_gives(
    tiny: TinyModel, greedy: dict[int, list[int]], options: dict[str, int]
) -> None:
    engine = tiny.engine(**options)
    results = tools.generate(engine, requests())
    assert (engine.stats().preemptions > 0) == ("num_blocks" in options)
    same_up_to_near_ties(tiny, {row: tools.tokens(result)[0] for row, result in results.items()}, greedy)


def test_an_adapter_that_was_evicted_answers_as_before(tiny: TinyModel, greedy: dict[int, list[int]]) -> None:
    engine = tiny.engine(max_loras=1, max_num_seqs=2)
    for _ in range(2):
        results = tools.generate(engine, requests())
        same_up_to_near_ties(tiny, {row: tools.tokens(result)[0] for row, result in results.items()}, greedy)
        digests = {rows()[row][0]: result.adapter_sha256 for row, result in results.items()}
        assert digests[None] is None
        assert len(set(digests.values())) == len(digests)


SAMPLED = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "seed": 5},
    {"temperature": 0.9, "top_k": 7, "n": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 5, "n": 2},
    {"temperature": 0.0},
]


def sampled_requests() -> list[Request]:
    return [
        Request(i, np.array(ids, np.int32), lora_id, SamplingParams(max_tokens=12, ignore_eos=True, **SAMPLED[i % 5]))
        for i, (lora_id, ids) in enumerate(rows())
    ]


def test_a_sampled_row_depends_on_nothing_but_itself(tiny: TinyModel) -> None:
    alone = tiny.engine(max_num_seqs=1)
    want = {r.row: tools.tokens(tools.generate(alone, [r])[r.row]) for r in sampled_requests()}
    tight = {"num_blocks": 12, "block_size": 8, "max_loras": 2}
    for seed, options in enumerate([{}, tight, {"max_num_batched_tokens": 25, "max_num_seqs": 7}]):
        shuffled = sampled_requests()
        random.Random(seed).shuffle(shuffled)
        got = tools.generate(tiny.engine(**options), shuffled)
        assert {row: tools.tokens(result) for row, result in got.items()} == want
    other_job = tools.generate(tiny.engine(seed=1), sampled_requests())
    differing = [row for row, result in other_job.items() if tools.tokens(result) != want[row]]
    assert sorted(differing) == [row for row in want if SAMPLED[row % 5]["temperature"]]


def test_samples_of_a_row_differ_and_come_in_order(tiny: TinyModel) -> None:
    prompt = np.array([BOS, 1, 2, 3], np.int32)
    many = Request(4, prompt, "b", SamplingParams(max_tokens=8, temperature=1.0, n=6, ignore_eos=True))
    few = Request(4, prompt, "b", SamplingParams(max_tokens=8, temperature=1.0, n=2, ignore_eos=True))
    samples = tools.tokens(tools.generate(tiny.engine(max_num_seqs=4), [many])[4])
    assert len(samples) == 6
    assert len({tuple(s) for s in samples}) == 6
    assert tools.tokens(tools.generate(tiny.engine(), [few])[4]) == samples[:2]


def test_equal_seeds_make_equal_rows(tiny: TinyModel) -> None:
    prompt = np.array([BOS, 7, 8], np.int32)
    params = [SamplingParams(max_tokens=10, temperature=1.0, seed=s, ignore_eos=True) for s in (3, None, 3, 4)]
    results = tools.generate(tiny.engine(), [Request(i, prompt, None, p) for i, p in enumerate(params)])
    texts = [tuple(tools.tokens(results[i])[0]) for i in range(4)]
    assert texts[0] == texts[2]
    assert len(set(texts)) == 3


def completion(tiny: TinyModel, **sampling: object) -> Completion:
    request = Request(0, np.array([BOS, 40, 41, 42], np.int32), "c", SamplingParams(**{"max_tokens": 20} | sampling))
    return tools.generate(tiny.engine(), [request])[0].completions[0]


def test_one_token(tiny: TinyModel) -> None:
    for row, result in tools.generate(tiny.engine(), requests(max_tokens=1)).items():
        assert len(tools.tokens(result)[0]) == 1, row
        assert result.completions[0].finish_reason is FinishReason.LENGTH


def test_eos_is_counted_and_not_shown(tiny: TinyModel) -> None:
    free = completion(tiny, ignore_eos=True)
    at = 6
    eos = free.token_ids[at]
    first = free.token_ids.index(eos)
    engine = tiny.engine()
    object.__setattr__(engine._endings, "eos_token_ids", frozenset({eos, 263}))
    request = Request(0, np.array([BOS, 40, 41, 42], np.int32), "c", SamplingParams(max_tokens=20))
    ended = tools.generate(engine, [request])[0].completions[0]
    assert ended.token_ids == free.token_ids[: first + 1]
    assert ended.finish_reason is FinishReason.STOP
    assert ended.text == engine._endings.tokenizer.decode(free.token_ids[:first])
    ignoring = Request(0, request.prompt_token_ids, "c", SamplingParams(max_tokens=20, ignore_eos=True))
    assert tools.generate(engine, [ignoring])[0].completions[0] == free


def test_a_stop_string_cuts_the_text_and_ends_the_row(tiny: TinyModel) -> None:
    free = completion(tiny, ignore_eos=True)
    decode = tiny.engine()._endings.tokenizer.decode
    stop = next(c for i, c in enumerate(free.text) if i > 3 and c != "�" and c not in free.text[:i])
    ended = completion(tiny, ignore_eos=True, stop=("never there", stop))
    assert ended.finish_reason is FinishReason.STOP
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert stop in decode(ended.token_ids)
    assert stop not in decode(ended.token_ids[:-1])


def test_logprobs_are_the_models(tiny: TinyModel) -> None:
    got = completion(tiny, ignore_eos=True, logprobs=3, temperature=0.7, top_k=5)
    assert got.logprobs is not None
    ids = [BOS, 40, 41, 42, *got.token_ids]
    exact = torch.log_softmax(tiny.reference([("c", ids)])[0][3:-1], -1)
    assert len(got.logprobs.chosen) == len(got.logprobs.top) == len(got.token_ids) == 20
    for i, token in enumerate(got.token_ids):
        assert got.logprobs.chosen[i] == pytest.approx(float(exact[i, token]), abs=1e-3)
        want = exact[i].topk(3)
        assert [t for t, _ in got.logprobs.top[i]] == want.indices.tolist()
        assert [p for _, p in got.logprobs.top[i]] == pytest.approx(want.values.tolist(), abs=1e-3)
    assert completion(tiny, ignore_eos=True).logprobs is None
    zero = completion(tiny, ignore_eos=True, logprobs=0).logprobs
    assert zero is not None
    assert set(zero.top) == {()}


def test_the_context_ends_a_row(tiny: TinyModel) -> None:
    request = Request(0, np.array([BOS] * 30, np.int32), None, SamplingParams(max_tokens=100, ignore_eos=True))
    result = tools.generate(tiny.engine(max_model_len=40), [request])[0]
    assert len(tools.tokens(result)[0]) == 10
    assert result.completions[0].finish_reason is FinishReason.LENGTH
    assert result.prompt_tokens == 30
