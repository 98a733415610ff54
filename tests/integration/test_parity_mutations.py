"""The parity comparison can fail: each deliberate mistake is far outside the tolerance that the right answer meets."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import parity_tools as tools
import pytest
import torch
from parity_tools import ARCHITECTURES, TinyModel

from punica_batch.engine.build import build_engine
from punica_batch.engine.engine import Engine

PROMPTS = [20, 33, 12, 17]


@pytest.fixture(scope="module", params=["llama31", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    torch.set_num_threads(1)
    model = TinyModel.make(tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param], seed=11)
    model.add_adapter("one", seed=1, r=8)
    model.add_adapter("two", seed=2, r=4)
    return model


def rows() -> list[tuple[str | None, list[int]]]:
    return tools.random_rows(["one", "two", None, "one"], [n + 4 for n in PROMPTS], seed=5)


def nothing(tiny: TinyModel, folder: Path) -> Engine:
    return tiny.engine()


def alpha_doubled(tiny: TinyModel, folder: Path) -> Engine:
    shutil.copytree(tiny.adapters["one"].path, folder / "one")
    config = json.loads((folder / "one" / "adapter_config.json").read_text())
    (folder / "one" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    adapters = tiny.adapters | {"one": dataclasses.replace(tiny.adapters["one"], path=str(folder / "one"))}
    return build_engine(dataclasses.replace(tiny.settings(), adapters=adapters))


def adapters_swapped(tiny: TinyModel, folder: Path) -> Engine:
    swapped = {"one": tiny.adapters["two"], "two": tiny.adapters["one"]}
    return build_engine(dataclasses.replace(tiny.settings(), adapters=swapped))


def layer_dropped(tiny: TinyModel, folder: Path) -> Engine:
    engine = tiny.engine()
    nothing_added = lambda heads, residual, *_: torch.zeros_like(residual)  # noqa: E731
    engine.runner.model.layers[1].finish = nothing_added  # type: ignore[method-assign]
    return engine


def rope_shifted(tiny: TinyModel, folder: Path) -> Engine:
    """By one from the sixth position on: shifting all alike would change nothing."""
    engine = tiny.engine()
    forward = engine.runner.model.forward

    def shifted(input_ids: torch.Tensor, positions: torch.Tensor, *rest: object) -> torch.Tensor:
        return forward(input_ids, positions + (positions > 5).long(), *rest)  # type: ignore[arg-type]

    engine.runner.model.forward = shifted  # type: ignore[method-assign]
    return engine


def adapters_ignored(tiny: TinyModel, folder: Path) -> Engine:
    engine = tiny.engine()
    engine.runner.model.kernels = dataclasses.replace(engine.runner.model.kernels, add_lora=lambda *_: None)
    for layer in engine.runner.model.layers:
        layer.kernels = engine.runner.model.kernels
    return engine


def slots_mixed_up(tiny: TinyModel, folder: Path) -> Engine:
    engine = tiny.engine()
    engine.lora_store.slot = lambda lora_id: 0  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(
    "mutate",
    [nothing, alpha_doubled, adapters_swapped, layer_dropped, rope_shifted, adapters_ignored, slots_mixed_up],
)
def test_only_the_unchanged_engine_passes(
    tiny: TinyModel, tmp_path: Path, mutate: Callable[[TinyModel, Path], Engine]
) -> None:
    ours = tools.teacher_forced(mutate(tiny, tmp_path), rows(), PROMPTS)
    error = tools.max_error(ours, tiny.reference(rows()))
    if mutate is nothing:
        assert error <= tiny.tolerance(rows())
    else:
        assert error > 100 * tiny.tolerance(rows())
