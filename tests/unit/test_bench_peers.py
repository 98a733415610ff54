"""Comparisons with Hugging Face and PEFT: in speed (textgen) and in text (tie_rate); and whole jobs (scaling)."""

from __future__ import annotations

import gc
import importlib.util
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("matplotlib")
from punica_batch.bench import scaling, startup, startup_child, textgen, workbench
from punica_batch.bench.hf_peft import HfPeft
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import load
from punica_batch.bench.record import Recorder
from punica_batch.bench.workbench import write_tokenizer
from punica_batch.engine import build as build_module
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import UsageError
from punica_batch.models.llama import LlamaModel
from punica_batch.models.weights import random_weights

ROOT = Path(__file__).parents[2]


def options(results: Path) -> BenchOptions:
    return BenchOptions(model_shape="tiny", dtype="float32", rank=4, device="cpu", results=results)


@pytest.fixture(scope="module")
def tie_rate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tie_rate", ROOT / "benchmarks" / "tie_rate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["tie_rate"] = module
    spec.loader.exec_module(module)
    return module


def test_peft_does_the_same_rows_both_ways() -> None:
    """A mixed batch and a loop over the adapters agree; adapters that were left out of it would not."""
    torch.manual_seed(0)
    peft = HfPeft("tiny", torch.float32, torch.device("cpu"), rank=4, adapters=3)
    for name, parameter in peft._model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(20)  # felt in every token
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 512, 6).astype(np.int32)] * 6
    which = [0, 1, 2, 0, 1, 2]
    mixed = peft.mixed(prompts, which, 5, batch=4)
    assert mixed == peft.loop(prompts, which, 5, batch=2)
    assert [len(answer) for answer in mixed] == [5] * 6
    assert len({tuple(answer) for answer in [*mixed[:3], peft.mixed(prompts[:1], None, 5, batch=1)[0]]}) == 4
    assert mixed[:3] == mixed[3:]


def test_the_textgen_command(tmp_path: Path) -> None:
    textgen.run(options(tmp_path))
    written = [json.loads(line) for line in (tmp_path / "textgen.jsonl").read_text().splitlines()]
    measured = {
        (x["parameters"]["system"], x["parameters"]["adapters"]): x for x in written if x["what"] == "throughput"
    }
    kinds = ("none", "uniform", "distinct")
    assert set(measured) == {
        *(("punica-batch", kind) for kind in kinds), *(("PEFT mixed", kind) for kind in kinds),
        ("PEFT loop", "uniform"), ("PEFT loop", "distinct"),
    }  # fmt: skip
    for line in (x for x in written if x["what"] == "speedup"):
        about = line["parameters"]
        theirs = measured[about["against"], about["adapters"]]["median"]
        assert line["median"] == pytest.approx(measured["punica-batch", about["adapters"]]["median"] / theirs, rel=1e-3)
    assert (tmp_path / "textgen-tiny-float32-cpu.png").is_file()


class Peft:
    """Stands for PEFT's side: says what it was asked to do."""

    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked

    def mixed(self, prompts: Any, which: list[int] | None, new: int, batch: int) -> list[list[int]]:
        self.asked.append(("mixed", which, new))
        return [[0] * new] * len(prompts)

    def loop(self, prompts: Any, which: list[int], new: int, batch: int) -> list[list[int]]:
        self.asked.append(("loop", which, new))
        return [[0] * new] * len(prompts)


def test_each_system_does_each_task_once_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is compiled and allocated at the first time counts for none; adapters load anew in the second."""
    asked: list[Any] = []

    class Peer:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Peer:
            return self

        def __exit__(self, *_: object) -> None: ...

        def generate(self, prompts: Any, which: list[int] | None, new: int) -> None:
            asked.append(("vLLM", which, new))

    monkeypatch.setattr(textgen, "has_vllm", lambda: True)
    monkeypatch.setattr(textgen, "VllmPeer", Peer)
    monkeypatch.setattr(textgen, "HfPeft", lambda *_: Peft(asked))
    textgen.run(options(tmp_path))
    uniform, distinct = [0, 1, 0, 1], [0, 1, 2, 3]
    for name, kinds in (("mixed", (None, uniform, distinct)), ("loop", (uniform, distinct))):
        assert [(which, new) for own, which, new in asked if own == name] == [(x, 3) for x in kinds for _ in "ab"]
    theirs = [(which, new) for own, which, new in asked if own == "vLLM"]
    assert [new for _, new in theirs] == [3] * 6
    assert [which for which, _ in theirs[:2]] == [None, None]
    seen: set[int] = set()
    for which, _ in theirs[2:]:
        assert not seen & set(which)
        seen |= set(which)
    assert [len(set(which)) for which, _ in theirs[2:]] == [2, 2, 4, 4]


def test_peft_has_the_device_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This engine's model is gone before there is another."""
    made: list[weakref.ref[LlamaModel]] = []

    def random(*arguments: Any, **more: Any) -> LlamaModel:
        model = random_weights(*arguments, **more)
        made.append(weakref.ref(model))
        return model

    def peft(*_: Any) -> Peft:
        gc.collect()
        assert made
        assert not any(model() for model in made)
        return Peft([])

    monkeypatch.setattr(workbench, "random_weights", random)
    monkeypatch.setattr(textgen, "HfPeft", peft)
    textgen.run(options(tmp_path))


def test_vllm_takes_no_part_on_another_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    @contextmanager
    def no_bench(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(model=SimpleNamespace(dtype=torch.float16))

    for name in ("_ours", "ceilings", "free_memory"):
        monkeypatch.setattr(textgen, name, lambda *_: None)
    monkeypatch.setattr(textgen, "workbench", no_bench)
    monkeypatch.setattr(textgen, "has_vllm", lambda: True)
    monkeypatch.setattr(textgen, "VllmPeer", fail)
    recorder = Recorder("textgen", replace(options(tmp_path), device="cuda:1"))
    textgen._engines(recorder, [], torch.device("cuda:1"))
    assert capsys.readouterr().err == "textgen: vLLM runs on the first GPU, not on cuda:1, and takes no part\n"


def test_scaling_refuses_a_gpu_that_jobs_would_not_take(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave out --device cuda:1"):
        scaling.run(replace(options(tmp_path), device="cuda:1"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("device", "number"), [("cuda:1", 1), ("cuda", 0), ("cpu", None)])
def test_the_process_that_starts_works_on_the_gpu_that_was_asked_for(
    device: str, number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapters" / "adapter0"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_text("")
    chosen: list[int] = []

    def build(settings: EngineSettings, times: object) -> None:
        assert settings.device == device
        assert chosen == ([] if number is None else [number])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(build_module, "build_engine", build)
    with pytest.raises(KeyboardInterrupt):
        startup_child.main(tmp_path, "float16", device, 0.0)


@pytest.mark.slow
def test_the_scaling_command(tmp_path: Path) -> None:
    scaling.run(options(tmp_path))
    written = [json.loads(line) for line in (tmp_path / "scaling.jsonl").read_text().splitlines()]
    one, two = (x for x in written if x["what"] == "whole job")
    assert (one["parameters"]["rows"], two["parameters"]["rows"]) == (6, 12)
    assert written[-1]["median"] == pytest.approx(two["median"] / one["median"], rel=1e-3)
    assert written[-1]["limit"] == 2


@pytest.mark.slow
def test_the_startup_command(tmp_path: Path) -> None:
    startup.run(options(tmp_path))
    written = [json.loads(line) for line in (tmp_path / "startup.jsonl").read_text().splitlines()]
    whole = next(x["median"] for x in written if x["parameters"].get("start") == "later")
    stages = {x["parameters"]["stage"]: x["median"] for x in written if x["what"] == "stage"}
    assert {"interpreter", "import torch", "other imports", "kernels", "weights", "kv cache", "graphs"} <= set(stages)
    assert 0 < max(stages.values()) < whole
    assert stages["import torch"] > 0.1
    assert (tmp_path / "startup-tiny-float32-cpu.png").is_file()


def test_rows_as_text_have_the_loads_lengths(tmp_path: Path) -> None:
    tokens = scaling.write_rows(tmp_path / "rows.parquet", 9, 64, 2)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    prompts, new = load("decode", 9, 64)
    assert tokens == 2 * sum(new) == sum(row["max_tokens"] for row in rows)
    tokenizer = write_tokenizer(tmp_path, 512)
    encoded = tokenizer.encode_batch([row["prompt"] for row in rows], templated=False)
    assert [len(ids) for ids in encoded] == [len(prompt) for prompt in prompts] * 2


class Answers:
    """Stands for a reference: the logits after any tokens are given."""

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits)

    def logits_after(self, row: object, tokens: list[int]) -> torch.Tensor:
        return self.logits


def test_a_row_parts_at_its_first_other_token(tie_rate: ModuleType) -> None:
    rows = [tie_rate.Row("p", "p", None)] * 3
    ours, theirs = [[0, 1, 2], [0, 2, 9], [0, 1, 0]], [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    exact, rounded = Answers([0.0, 1.0, 0.9]), Answers([0.01, 1.02, 0.9])
    parted = tie_rate.partings(rows, ours, theirs, exact, rounded)
    assert [(parting.row, parting.at) for parting in parted] == [(1, 1), (2, 2)]
    near, beyond = parted
    assert near.gap == pytest.approx(0.1)
    assert near.tolerance == pytest.approx(0.08)
    assert beyond.gap == pytest.approx(1.0)


def test_the_sample_gives_rows_of_every_adapter(tie_rate: ModuleType) -> None:
    folders, templates = tie_rate.read_adapters(tie_rate.SAMPLE / "adapters.toml")
    files = [tie_rate.SAMPLE / "requests.parquet", tie_rate.SAMPLE / "heldout.parquet"]
    rows = tie_rate.read_rows(files, 512, list(folders), templates)
    assert len(rows) == 512
    assert {row.lora_id for row in rows} == {None, *folders}
    assert all((folder / "adapter_config.json").is_file() for folder in folders.values())
    for row in rows:
        assert row.text == (row.prompt if row.lora_id is None else f"### Message\n{row.prompt}\n### Answer\n")


def test_rows_that_name_other_adapters_get_those_there_are_in_turn(tie_rate: ModuleType) -> None:
    files = [tie_rate.SAMPLE / "heldout.parquet"]
    rows = tie_rate.read_rows(files, 64, ["a", "b"], {"b": "<{prompt}>"})
    assert {row.lora_id for row in rows} == {None, "a", "b"}
    assert all(row.text == (f"<{row.prompt}>" if row.lora_id == "b" else row.prompt) for row in rows)
