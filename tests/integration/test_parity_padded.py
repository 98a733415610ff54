"""Steps filled up to recorded shapes and planned ahead, as on a GPU, on the CPU: the answers stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity_tools as tools
import pytest
import torch
from parity_tools import ALL, ARCHITECTURES, TinyModel
from torch import Tensor

from punica_batch.engine.engine import Engine
from punica_batch.engine.graphs import Forward, StepGraphs

ADAPTERS = ["r1", "r1", None, "r3", "r1", "r16", "r3", None, "r16", "r3"]
PROMPTS = [15, 16, 17, 32, 33, 1, 2, 31, 40, 20]
CONTINUATION = 4


class PlainRecorder:
    """Records nothing: runs each step's own forward pass, over what was filled up."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, forward: Forward) -> Callable[[Forward], Tensor]:
        def replay(forward: Forward) -> Tensor:
            self.replays += 1
            return forward()

        return replay


@pytest.fixture(scope="module", params=["llama31", "mistral"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    model = TinyModel.make(tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param], seed=7)
    for i, rank in enumerate((1, 3, 16)):
        model.add_adapter(f"r{rank}", seed=100 + i, r=rank)
    model.add_adapter("all", seed=110, target_modules=[*ALL, "embed_tokens", "lm_head"], r=2)
    return model


def as_on_a_gpu(tiny: TinyModel, **options: Any) -> tuple[Engine, PlainRecorder]:
    engine, recorder = tiny.engine(**options), PlainRecorder()
    engine.runner.graphs = StepGraphs(recorder)
    engine._steps_ahead = 1
    return engine, recorder


@pytest.mark.parametrize("budget", [512, 23], ids=["whole", "chunked"])
def test_logits(tiny: TinyModel, budget: int) -> None:
    rows = tools.random_rows(ADAPTERS, [n + CONTINUATION for n in PROMPTS], seed=3)
    engine, recorder = as_on_a_gpu(tiny, max_num_batched_tokens=budget, max_num_seqs=10)
    ours = tools.teacher_forced(engine, rows, PROMPTS)
    assert tools.max_error(ours, tiny.reference(rows)) <= tiny.tolerance(rows)
    assert recorder.replays > 0 or budget == 512


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one batch"),
        pytest.param({"max_num_batched_tokens": 19, "max_num_seqs": 9}, id="chunked"),
        pytest.param({"num_blocks": 13, "block_size": 8, "max_model_len": 88}, id="preempted"),
        pytest.param({"max_loras": 1}, id="one slot"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers(tiny: TinyModel, options: dict[str, int], temperature: float) -> None:
    """Those of an engine that takes one step after the other as it is: tokens, ends, log-probabilities."""
    requests = tools.requests_of(
        tools.random_rows(ADAPTERS, PROMPTS, seed=21), max_tokens=20, temperature=temperature, logprobs=2
    )
    engine, recorder = as_on_a_gpu(tiny, **options)
    ours = tools.generate(engine, requests)
    plain = tools.generate(tiny.engine(**options), requests)
    for row, result in plain.items():
        assert tools.tokens(ours[row]) == tools.tokens(result), row
        for mine, theirs in zip(ours[row].completions, result.completions, strict=True):
            assert mine.finish_reason == theirs.finish_reason
            assert mine.text == theirs.text
            assert mine.logprobs is not None
            assert theirs.logprobs is not None
            torch.testing.assert_close(
                torch.tensor(mine.logprobs.chosen), torch.tensor(theirs.logprobs.chosen), atol=1e-4, rtol=1e-4
            )
    assert recorder.replays > 0
    engine.check_integrity()


def test_an_adapter_of_embedding_and_head_runs_as_it_is(tiny: TinyModel) -> None:
    rows = tools.random_rows(["all", "all"], [9, 17], seed=5)
    engine, recorder = as_on_a_gpu(tiny)
    ours = tools.teacher_forced(engine, rows, [5, 9])
    assert tools.max_error(ours, tiny.reference(rows)) <= tiny.tolerance(rows)
    assert recorder.replays == 0


def test_what_is_filled_up_is_the_scratch_block_alone(tiny: TinyModel, tmp_path: Path) -> None:
    """No key of a row lies elsewhere than without: the blocks hold the same after the same steps."""
    rows = tools.random_rows([None, None, None], [9, 5, 17], seed=5)
    caches = []
    for engine in (as_on_a_gpu(tiny)[0], tiny.engine()):
        for keys, values in engine.runner.kv_cache.layers:
            keys.zero_()
            values.zero_()
        tools.generate(engine, tools.requests_of(rows, max_tokens=6, ignore_eos=True))
        caches.append(engine.runner.kv_cache)
    scratch = caches[0].scratch_block
    for padded, plain in zip(caches[0].layers, caches[1].layers, strict=True):
        for ours, theirs in zip(padded, plain, strict=True):
            torch.testing.assert_close(ours[:scratch], theirs[:scratch], atol=1e-5, rtol=1e-5)
