"""The engine's bookkeeping over a runner that computes nothing: endings, failures, taking back, stopping, counting."""

from __future__ import annotations

import pickle
import random

import pytest
from engine_script import EOS, make, row, run, steps_ahead  # noqa: F401 (a fixture of all tests here)

from punica_batch.engine.lora_pack import PackedAdapter
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import StoreAway, UsageError
from punica_batch.types import FinishReason, Request


def test_the_ways_to_end() -> None:
    script = {
        0: [1, 2, 3, 4, 5],  # length
        1: [1, 2, EOS],
        2: [1, 20],  # another EOS id
        3: [1, 2, EOS, 3, 4],  # ignored
        4: [2, 3, 4, 5],  # "cd" then "e": the stop string lies across tokens
        5: [1, 1, 1, 1, EOS],  # EOS as the last token that length allows
        6: [1, 1, 1, 1, 7],  # a stop string with the last token that length allows
    }
    results = run(
        make(lambda r, s: script[r]),
        row(0), row(1), row(2), row(3, ignore_eos=True), row(4, stop=("zz", "de")), row(5), row(6, stop=("h",)),
    )  # fmt: skip
    got = {
        i: (r.completions[0].token_ids, r.completions[0].text, r.completions[0].finish_reason)
        for i, r in results.items()
    }
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert got == {
        0: ((1, 2, 3, 4, 5), "bcdef", length),
        1: ((1, 2, EOS), "bc", stop),
        2: ((1, 20), "b", stop),
        3: ((1, 2, EOS, 3, 4), "bcjde", length),
        4: ((2, 3, 4), "c", stop),
        5: ((1, 1, 1, 1, EOS), "bbbb", stop),
        6: ((1, 1, 1, 1, 7), "bbbb", stop),
    }
    assert all(r.prompt_tokens == 3 and r.error is None and r.adapter_sha256 is None for r in results.values())


def test_samples_come_together_and_in_order() -> None:
    script = {0: [3, EOS], 1: [1, 1, 1, 1, 1], 2: [EOS]}
    engine = make(lambda r, s: script[s] if r == 7 else [EOS])
    engine.add(row(7, n=3))
    engine.add(row(8))
    assert [r.row for r in engine.step() or engine.step()] == [8]
    (result,) = run(engine).values()
    assert [c.token_ids for c in result.completions] == [(3, EOS), (1,) * 5, (EOS,)]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (row(0, length=0), "empty_prompt"),
        (row(0, length=40), "prompt_too_long"),
        (row(0, length=41), "prompt_too_long"),
        (row(0, length=20, max_tokens=30), "kv_too_small"),
        (row(0, lora_id="nobody"), "unknown_adapter"),
    ],
)
def test_rows_that_can_never_run_fail_and_others_do_not(request_: Request, code: str) -> None:
    engine = make(num_blocks=8)
    engine.add(row(1))
    engine.add(request_)
    assert engine.has_work
    results = run(engine)
    assert results[0].error is not None
    assert results[0].error.startswith(f"{code}: ")
    assert results[0].completions == ()
    assert results[0].prompt_tokens == request_.num_prompt_tokens
    assert results[1].error is None


def test_a_row_that_just_fits_runs_to_the_end_of_the_context() -> None:
    results = run(make(), row(0, length=39, max_tokens=100))
    assert len(results[0].completions[0].token_ids) == 1
    assert results[0].completions[0].finish_reason is FinishReason.LENGTH


def test_one_bad_adapter_fails_its_rows_alone() -> None:
    engine = make()
    requests = [row(i, lora_id=("a", "bad", None, "b", "bad", "c")[i % 6], n=1 + i % 2) for i in range(24)]
    results = run(engine, *requests)
    for request in requests:
        result = results[request.row]
        if request.lora_id == "bad":
            assert result.error == "adapter_unreadable: adapter 'bad': no such file"
            assert result.adapter_sha256 is None
        else:
            assert result.error is None
            assert result.adapter_sha256 == (request.lora_id and f"sha-{request.lora_id}")
    again = run(engine, row(100, lora_id="bad"), row(101, lora_id="a"))
    assert again[100].error == results[1].error
    assert again[101].error is None


def test_a_store_that_is_away_raises() -> None:
    def away(lora_id: str) -> PackedAdapter:
        raise StoreAway("the store does not answer")

    engine = make(load=away)
    engine.add(row(0, lora_id="a"))
    with pytest.raises(StoreAway):
        run(engine)


def test_nan_fails_the_row_with_all_its_samples_and_frees_what_it_held() -> None:
    scripts: dict[tuple[int, int], list[int | None]] = {(0, 0): [1, 1, 1, 1, 1], (0, 1): [1, None], (0, 2): [EOS]}
    engine = make(lambda r, s: scripts[r, s] if r == 0 else [1] * 5)
    results = run(engine, row(0, n=3, lora_id="a"), row(1, lora_id="a"))
    assert results[0].error == "nan_logits: the model computed NaN or Inf for this row"
    assert len(results[1].completions[0].token_ids) == 5
    assert engine.stats().kv_blocks_used == 0


def test_a_row_in_work_is_not_taken_twice() -> None:
    engine = make()
    engine.add(row(0))
    with pytest.raises(ValueError, match="row 0"):
        engine.add(row(0))
    run(engine)
    assert 0 in run(engine, row(0))


def test_take_back_gives_whole_rows_that_have_not_started() -> None:
    engine = make(max_num_seqs=2)
    requests = [row(0), row(1), row(2, n=2), row(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.take_back(2) == [requests[3], requests[2]]
    assert engine.take_back(5) == []
    assert set(run(engine)) == {0, 1}
    assert set(run(engine, *requests[2:])) == {2, 3}


def test_abort_drops_a_row_anywhere() -> None:
    engine = make(max_num_seqs=2)
    for i in range(4):
        engine.add(row(i))
    engine.step()
    engine.abort(0)
    engine.abort(3)
    engine.abort(77)
    engine.check_integrity()
    assert set(run(engine)) == {1, 2}


def test_stats_count() -> None:
    engine = make(max_num_batched_tokens=8)
    engine.add(row(0, length=20, max_tokens=3))
    engine.add(row(1, length=1, max_tokens=3))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_total, stats.steps) == (1, 1, 64, 1)
    assert stats.kv_blocks_used == 6  # the prompt's five and room for the next token
    assert (stats.prompt_tokens, stats.generated_tokens) == (8, 0)
    run(engine)
    stats = engine.stats()
    assert (stats.generated_tokens, stats.running, stats.kv_blocks_used, stats.preemptions) == (6, 0, 0, 0)
    assert 20 <= stats.prompt_tokens <= 21  # a prompt of one token counts as a decode


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_answer_every_row_once(seed: int) -> None:
    """Tight cache, few slots, random lengths and samples: each row's tokens are its script's."""
    choose = random.Random(seed)

    def script(r: int, s: int) -> list[int | None]:
        own = random.Random(r * 1000 + s)
        return [own.choice([1, 2, 3, 4, EOS, None if own.random() < 0.05 else 5]) for _ in range(20)]

    engine = make(script, num_blocks=10, max_loras=choose.choice([1, 2]), max_num_seqs=choose.choice([1, 3, 8]))
    requests = [
        row(
            i, choose.randint(1, 20), choose.choice([None, "a", "b", "c"]),
            max_tokens=choose.randint(1, 20), n=choose.randint(1, 3),
        )
        for i in range(40)
    ]  # fmt: skip
    results = run(engine, *requests)
    assert set(results) == set(range(40))
    for request in requests:
        want: list[tuple[int, ...]] = []
        for s in range(request.sampling.n):
            tokens = script(request.row, s)[: request.sampling.max_tokens]
            end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
            want.append(tuple(tokens[:end]))  # type: ignore[arg-type]
        result = results[request.row]
        if any(None in tokens for tokens in want):
            assert result.error is not None
        else:
            assert [c.token_ids for c in result.completions] == want
    assert engine.stats().kv_blocks_used == 0


def test_settings_are_plain_and_checked() -> None:
    settings = EngineSettings(model="m", num_blocks=4, max_model_len=8, storage_options={"key": "secret"})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "secret" not in repr(settings)
    with pytest.raises(UsageError, match="num_blocks"):
        EngineSettings(model="m", num_blocks=0, max_model_len=8)
    with pytest.raises(UsageError, match="max_num_batched_tokens"):
        EngineSettings(model="m", num_blocks=4, max_model_len=8, max_num_seqs=64, max_num_batched_tokens=63)
