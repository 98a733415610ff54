"""Comparisons with Hugging Face and PEFT: in speed (textgen) and in text (tie_rate); and whole jobs (scaling)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("matplotlib")
from punica_batch.bench import scaling, startup, textgen
from punica_batch.bench.hf_peft import HfPeft
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import load
from punica_batch.bench.workbench import write_tokenizer

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
