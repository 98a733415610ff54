"""The kernels of a job are built before it: by the real engine, small, over what its loads make it run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from punica_batch.config import JobConfig
from punica_batch.engine import prebuild
from punica_batch.engine.engine import Engine
from punica_batch.engine.kernel_cache import KernelBuild
from punica_batch.engine.prebuild import Load, decode_loads, longest_prompt, prefill_loads
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import JobError, ModelError
from punica_batch.planning.prebuild import engine_settings
from punica_batch.types import AdapterSpec
from punica_batch.workers.devices import cpu_devices
from punica_batch.workers.prebuild import build_kernels

MODEL = Path(__file__).parents[2] / "sample_data" / "model"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all tests here: compiling takes seconds."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PUNICA_BATCH_CACHE", str(folder))
        yield folder


def settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model": str(MODEL), "num_blocks": 60, "max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": 512,
        "max_loras": 3, "max_lora_rank": 8,
    }  # fmt: skip
    return EngineSettings(**values | changes)


def build(**changes: Any) -> list[KernelBuild]:
    return list(build_kernels(settings(**changes), cpu_devices(1)[0], (3, 8), ("q_proj", "down_proj")))


def test_a_second_time_everything_is_there(cache: Path) -> None:
    first, second = build(), build()
    assert [stage.name for stage in first] == [stage.name for stage in second]
    assert len(list(cache.rglob("*.so"))) == sum(stage.compiled for stage in first) >= 1
    assert sum(stage.compiled for stage in second) == 0
    assert all(stage.error is None for stage in first)


def test_the_trial_runs_rows_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, ...]] = []
    step = Engine.step

    def watched(engine: Engine) -> Any:
        results = step(engine)
        slots = engine.lora_store.model_lora.layers[0].qkv.slots
        held.append(tuple(sorted({slot.ranks[0] for slot in slots if slot is not None})))
        return results

    monkeypatch.setattr(Engine, "step", watched)
    list(prebuild.prebuild(settings(), (3, 8), ("q_proj",)))
    assert (3, 8) in held


def test_what_cannot_be_run_ends_it_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        build(model=str(tmp_path))
    with pytest.raises(JobError, match="trial run failed: kv_too_small"):
        build(num_blocks=1)
    with pytest.raises(JobError, match="building the kernels failed"):  # any death of the process
        list(build_kernels(object(), cpu_devices(1)[0], (), ()))


def named(count: int) -> dict[str, AdapterSpec]:
    return {f"a{i}": AdapterSpec(f"a{i}", "x") for i in range(count)}


def shapes(loads: Iterator[Load]) -> list[tuple[int, int, int]]:
    """(rows, prompt tokens in all, distinct adapters) of each load"""
    found = []
    for load in loads:
        used = [load.adapters[i % len(load.adapters)] for i in range(len(load.lengths))]
        found.append((len(load.lengths), sum(load.lengths), len({name for name in used if name is not None})))
    return found


def test_decode_loads_have_every_size_and_popularity() -> None:
    found = shapes(decode_loads(settings(max_num_seqs=12, adapters=named(64))))
    assert {rows for rows, _, _ in found} == {1, 2, 4, 8, 12}
    assert {distinct for rows, _, distinct in found if rows == 12} == {0, 1, 3, 12}
    assert {distinct for _, _, distinct in shapes(decode_loads(settings(max_num_seqs=12)))} == {0}


def test_prefill_loads_reach_the_largest_step() -> None:
    for limits in ({"max_num_batched_tokens": 4096, "max_model_len": 100_000}, {"max_model_len": 50}):
        chosen = settings(**limits, adapters=named(64))
        found = shapes(prefill_loads(chosen))
        longest = longest_prompt(chosen)
        assert max(tokens for _, tokens, _ in found) == longest
        assert longest == min(chosen.max_num_batched_tokens, chosen.max_model_len - 4)
        assert {distinct for _, _, distinct in found} == {0, 1, 3}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fewer_tokens_a_step_than_rows_make_a_smaller_batch(kind: str) -> None:
    config = JobConfig(model=str(MODEL), adapters=str(MODEL.parent / "adapters.toml"), max_num_batched_tokens=3)
    settings, _, _ = engine_settings(config, kind)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (3, 3)
