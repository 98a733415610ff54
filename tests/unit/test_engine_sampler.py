"""The sampler against known answers, an independent Philox, brute-force filters and the exact distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_batch.engine import sampler
from punica_batch.engine.philox import GUMBEL_SPAN, RACE_RATIO, gumbel, philox4x32, splitmix64, stream_keys
from punica_batch.engine.sampler import MIN_TEMPERATURE, SamplingBatch, greedy, sample
from punica_batch.types import SamplingParams

WIDTHS = {
    32: (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85),
    64: (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
}


def philox_reference(key: list[int], counter: list[int], bits: int) -> list[int]:
    """Philox4xW-10 in Python's integers; at 64 bits it is numpy's generator, which vouches for it."""
    m0, m1, w0, w1 = WIDTHS[bits]
    mask = 2**bits - 1
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (p1 >> bits) ^ c1 ^ k0, p1 & mask, (p0 >> bits) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return [c0, c1, c2, c3]


def ours(key: list[list[int]], counter: list[list[int]]) -> list[list[int]]:
    words = philox4x32(torch.tensor(key).unbind(1), torch.tensor(counter).unbind(1))
    return torch.stack(words, dim=1).tolist()


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # Random123's kat_vectors, philox4x32 10
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], answer: str) -> None:
    assert ours([key], [counter]) == [[int(word, 16) for word in answer.split()]]


def test_the_philox_reference_is_numpys() -> None:
    generator = np.random.Philox(
        key=np.array([123, 456], dtype=np.uint64), counter=np.array([6, 7, 8, 9], dtype=np.uint64)
    )
    # numpy steps the counter before it draws
    assert generator.random_raw(4).tolist() == philox_reference([123, 456], [7, 7, 8, 9], 64)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6), min_size=1, max_size=8))
def test_philox_equals_the_reference(rows: list[list[int]]) -> None:
    keys, counters = [r[:2] for r in rows], [r[2:] for r in rows]
    assert ours(keys, counters) == [philox_reference(k, c, 32) for k, c in zip(keys, counters, strict=True)]


def test_splitmix64_known_answers() -> None:
    # The published generator seeded with 1234567 (its state advances by the golden gamma).
    states = np.array([1234567], dtype=np.uint64) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_stream_keys_differ_by_each_word() -> None:
    def key(job: int, flag: int, value: int, sample_number: int) -> int:
        return int(stream_keys(job, *(np.array([w], dtype=np.uint64) for w in (flag, value, sample_number)))[0])

    words = [(job, flag, value, s) for job in (-1, 0, 1) for flag in (0, 1) for value in range(20) for s in range(8)]
    assert len({key(*w) for w in words}) == len(words)
    assert key(3, 1, 5, 2) == key(3, 1, 5, 2)


def test_bounds_of_the_noise() -> None:
    ends = gumbel(torch.tensor([0, 2**32 - 1]))
    assert torch.isfinite(ends).all()
    assert 26.0 < float(ends[1] - ends[0]) < GUMBEL_SPAN
    words = torch.cat([torch.arange(0, 2**32, 2**20 + 7), torch.arange(100), 2**32 - 1 - torch.arange(100)])
    uniform = (words.double() + 0.5) / 2**32
    ratio = torch.exp(-gumbel(words)) / (1 - uniform)
    assert float(ratio.min()) >= 1
    assert 22.8 < float(ratio.max()) < RACE_RATIO


# ---- choosing -------------------------------------------------------------------------------------------------------


def batch_of(
    params: list[SamplingParams], rows: list[int] | None = None, position: int = 5, job_seed: int = 0
) -> SamplingBatch:
    count = len(params)
    return SamplingBatch.build(params, rows or list(range(count)), [0] * count, [position] * count, job_seed)


def kept_reference(logits: np.ndarray, p: SamplingParams) -> set[int]:
    """vLLM's filters one token at a time: temperature, min-p, top-k, top-p over what the former left."""
    scores = [float(x) / max(p.temperature, MIN_TEMPERATURE) for x in logits]
    top = max(scores)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept = [i for i in order if math.exp(scores[i] - top) >= p.min_p * (1 - 1e-12)]
    if p.top_k > 0 and len(kept) > p.top_k:
        kept = [i for i in kept if scores[i] >= scores[kept[p.top_k - 1]]]
    total = math.fsum(math.exp(scores[i] - top) for i in kept)
    mass, nucleus = 0.0, []
    for i in kept:
        if mass / total >= p.top_p and p.top_p < 1 and scores[i] < scores[nucleus[-1]]:
            break
        nucleus.append(i)
        mass += math.exp(scores[i] - top)
    return set(nucleus)


def choice_reference(logits: np.ndarray, p: SamplingParams, row: int, position: int, job_seed: int) -> int:
    flag, value = (0, row) if p.seed is None else (1, p.seed % 2**64)
    key = int(stream_keys(job_seed, *(np.array([w], dtype=np.uint64) for w in (flag, value, 0)))[0])
    best, answer = -math.inf, -1
    for token in sorted(kept_reference(logits, p)):
        word = philox_reference([key % 2**32, key >> 32], [token // 4, position, 0, 0], 32)[token % 4]
        score = float(logits[token]) / max(p.temperature, MIN_TEMPERATURE) - math.log(-math.log((word + 0.5) / 2**32))
        if score > best:
            best, answer = score, token
    return answer


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-9, 0.01, 0.3, 1.0, 1.7, 20.0]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 37, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(sampling_params, min_size=1, max_size=5),
    vocab=st.sampled_from([1, 2, 3, 4, 5, 31, 203]),
    numpy_seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    job_seed=st.integers(0, 2**64 - 1),
)
def test_choice_equals_the_brute_force(
    params: list[SamplingParams], vocab: int, numpy_seed: int, scale: float, job_seed: int
) -> None:
    logits = (np.random.default_rng(numpy_seed).standard_normal((len(params), vocab)) * scale).astype(np.float32)
    out = sample(torch.from_numpy(logits), batch_of(params, position=9, job_seed=job_seed))
    want = [choice_reference(x, p, row, 9, job_seed) for row, (x, p) in enumerate(zip(logits, params, strict=True))]
    assert out.token_ids.tolist() == want


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 8.0])
def test_the_race_equals_adding_noise_to_every_token(scale: float) -> None:
    rows, vocab, position = 40, 4001, 77
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(8)) * scale
    params = [SamplingParams(temperature=[0.5, 1.0, 2.0][i % 3]) for i in range(rows)]
    batch = batch_of(params, position=position)
    group = torch.arange(-(-vocab // 4))
    zero = torch.zeros((), dtype=torch.int64)
    want = []
    for i in range(rows):
        key = batch.keys[i : i + 1].view(np.uint64).item()
        halves = torch.tensor(key % 2**32), torch.tensor(key >> 32)
        words = torch.stack(philox4x32(halves, (group, torch.tensor(position), zero, zero)), dim=1)
        noise = gumbel(words).flatten()[:vocab]
        want.append(int((logits[i].double() / params[i].temperature + noise).argmax()))
    assert sample(logits, batch).token_ids.tolist() == want


def test_wide_nucleus_looks_past_the_first_likeliest_tokens() -> None:
    logits = torch.zeros(2, 3000)
    logits[:, ::2] = 0.5  # 1,500 likelier tokens: more than the first look takes
    params = SamplingParams(temperature=1.0, top_p=0.3)
    seen = {int(t) for s in range(300) for t in sample(logits, batch_of([params] * 2, job_seed=s)).token_ids}
    assert all(token % 2 == 0 for token in seen)  # equals of the nucleus's last are kept, lesser ones are not
    assert max(seen) > 2048


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.15),
        SamplingParams(temperature=0.8, min_p=0.02, top_k=6, top_p=0.9),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_distribution_by_chi_square(params: SamplingParams) -> None:
    draws = 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.9, -8.0])
    out = sample(logits.repeat(draws, 1), batch_of([params] * draws))
    counts = torch.bincount(out.token_ids, minlength=10).double()
    kept = sorted(kept_reference(logits.numpy(), params))
    expected = torch.softmax(logits[kept].double() / params.temperature, 0) * draws
    assert counts.sum() == counts[kept].sum()
    tested = expected > 5
    chi2 = float((((counts[kept] - expected) ** 2) / expected)[tested].sum())
    freedom = max(int(tested.sum()) - 1, 1)
    # Wilson-Hilferty's normal approximation, 4.5 standard deviations; seeds are fixed, so this never flickers
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.5


def test_choices_at_successive_positions_are_independent() -> None:
    draws = 4000
    params = [SamplingParams(temperature=1.0)] * draws
    logits = torch.zeros(draws, 4)
    first = sample(logits, batch_of(params, position=1)).token_ids
    second = sample(logits, batch_of(params, position=2)).token_ids
    joint = torch.bincount(first * 4 + second, minlength=16).double()
    assert float(((joint - draws / 16) ** 2 / (draws / 16)).sum()) < 45  # 15 degrees of freedom, p < 1e-4


def test_same_row_same_choice_in_any_batch_order_and_mix() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 500, generator=generator)
    params = [
        SamplingParams(
            temperature=[0.0, 1.0, 1.3][i % 3], top_k=[0, 9][i % 2], top_p=[1.0, 0.8][i // 7 % 2], seed=[None, i][i % 2]
        )
        for i in range(40)
    ]
    whole = sample(logits, batch_of(params)).token_ids
    order = torch.randperm(40, generator=generator).tolist()
    shuffled = sample(logits[order], batch_of([params[i] for i in order], rows=order)).token_ids
    assert shuffled.tolist() == whole[order].tolist()
    for i in range(40):
        assert sample(logits[i : i + 1], batch_of([params[i]], rows=[i])).token_ids.item() == whole[i]


def test_chunks_do_not_change_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=1.0, top_p=0.9)] * 9
    whole = sample(logits, batch_of(params)).token_ids.tolist()
    monkeypatch.setattr(sampler, "_CHUNK_LOGITS", 130)
    assert sample(logits, batch_of(params)).token_ids.tolist() == whole


def test_own_seed_decides_and_neighbours_do_not() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(3)).repeat(6, 1)
    seeds = [7, 7, None, None, 8, -1]
    ids = sample(
        logits, batch_of([SamplingParams(temperature=5.0, seed=s) for s in seeds], rows=[1, 2, 7, 3, 5, 6])
    ).token_ids.tolist()
    assert ids[0] == ids[1]  # the seed alone, not the row's number
    assert len(set(ids[1:])) == 5  # and seed 7 is not row 7


def test_no_global_generator_is_touched() -> None:
    before = torch.random.get_rng_state()
    sample(
        torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), batch_of([SamplingParams(temperature=1.0)] * 3)
    )
    assert torch.equal(before, torch.random.get_rng_state())


def test_greedy_takes_the_first_of_equals_and_leaves_logits_alone() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 3.0], [0.0, -1.0, 4.0]])
    copy = logits.clone()
    out = sample(logits, batch_of([SamplingParams(), SamplingParams(), SamplingParams(temperature=0.5)]))
    assert out.token_ids.tolist()[:2] == [1, 0]
    assert torch.equal(logits, copy)
    assert out.chosen_logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_logits_are_told_and_disturb_no_other_row(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 41, generator=torch.Generator().manual_seed(4))
    params = [SamplingParams(temperature=temperature)] * 3
    want = sample(logits, batch_of(params)).token_ids.tolist()
    spoiled = logits.clone()
    spoiled[1] = bad
    out = sample(spoiled, batch_of(params))
    assert out.finite.tolist() == [True, False, True]
    assert [out.token_ids.tolist()[i] for i in (0, 2)] == [want[0], want[2]]
    assert 0 <= int(out.token_ids[1]) < 41
    one_nan = logits.clone()
    one_nan[1, 17] = float("nan")
    assert sample(one_nan, batch_of(params)).finite.tolist() == [True, False, True]


def test_logprobs_are_the_models_own_and_only_for_rows_that_ask() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    params = [
        SamplingParams(),
        SamplingParams(logprobs=3, temperature=0.7, top_k=2),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=1.0),
    ]
    batch = batch_of(params)
    out = sample(logits, batch)
    assert batch.logprob_rows.tolist() == [1, 2]
    assert out.chosen_logprobs is not None
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    exact = logits.double() - logits.double().logsumexp(1, keepdim=True)
    for place, row in enumerate((1, 2)):
        assert float(out.chosen_logprobs[place]) == pytest.approx(float(exact[row, out.token_ids[row]]), abs=1e-6)
        assert out.top_ids[place].tolist() == exact[row].argsort(descending=True)[:3].tolist()
        assert out.top_logprobs[place].tolist() == pytest.approx(
            exact[row].sort(descending=True).values[:3].tolist(), abs=1e-6
        )


def test_more_logprobs_than_vocabulary() -> None:
    out = sample(torch.randn(1, 5, generator=torch.Generator().manual_seed(6)), batch_of([SamplingParams(logprobs=20)]))
    assert out.top_ids is not None
    assert sorted(out.top_ids[0].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_choose_as_their_float32(dtype: torch.dtype) -> None:
    """Many of them are equal."""
    logits = (torch.randn(12, 5000, generator=torch.Generator().manual_seed(9)) * 3).to(dtype)
    params = [SamplingParams(temperature=i % 3 / 2, top_p=[1.0, 0.8][i % 2], logprobs=i % 4 or None) for i in range(12)]
    got, want = sample(logits, batch_of(params)), sample(logits.float(), batch_of(params))
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.chosen_logprobs is not None
    assert want.chosen_logprobs is not None
    assert torch.equal(got.chosen_logprobs, want.chosen_logprobs)
    token_ids, finite = greedy(logits)
    assert token_ids.tolist() == logits.float().numpy().argmax(axis=1).tolist()
    assert finite.all()


def test_what_greedy_alone_answers() -> None:
    assert batch_of([SamplingParams(), SamplingParams(seed=3)]).greedy_only
    assert not batch_of([SamplingParams(), SamplingParams(temperature=1.0)]).greedy_only
    assert not batch_of([SamplingParams(), SamplingParams(logprobs=0)]).greedy_only
