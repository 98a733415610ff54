"""``Engine.generate``: tables in, tables of the same kind out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parity_tools as tools
import polars as pl
import pyarrow as pa
import pytest
import torch
from parity_tools import ARCHITECTURES, TinyModel

from punica_batch import Engine, JobConfig
from punica_batch.errors import InputError, JobError, UsageError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    torch.set_num_threads(1)
    model = TinyModel.make(tmp_path_factory.mktemp("smollm"), ARCHITECTURES["smollm"], seed=23)
    model.add_adapter("a", seed=1)
    model.add_adapter("b", seed=2, r=3)
    return model


def config(tiny: TinyModel, **options: Any) -> JobConfig:
    defaults = {"model": str(tiny.folder), "adapters": str(tiny.folder.parent / "adapters"), "max_tokens": 6}
    return JobConfig(**defaults | {"ignore_eos": True, "max_model_len": 64} | options)


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Iterator[Engine]:
    with Engine(config(tiny)) as engine:
        yield engine


TABLE = pa.table({
    "prompt": ["one", "two", "", "four", None, "six" * 50],
    "lora_id": pa.array(["a", None, "a", "b", "b", "a"]).dictionary_encode(),
    "kept": pa.array([{"x": i} for i in range(6)]),
    "max_tokens": [None, 2, None, None, None, None],
})  # fmt: skip


def test_rows_in_order_with_their_own_answers(tiny: TinyModel, engine: Engine) -> None:
    out = engine.generate(TABLE)
    assert out.column_names[:4] == TABLE.column_names
    assert out.select(TABLE.column_names) == TABLE
    assert out["finish_reason"].to_pylist() == ["length", "length", "error", "length", "error", "error"]
    assert out["completion_tokens"].to_pylist() == [6, 2, None, 6, None, None]
    assert [e and e.partition(":")[0] for e in out["error"].to_pylist()] == [
        None, None, "empty_prompt", None, "null_prompt", "prompt_too_long",
    ]  # fmt: skip
    core = tiny.engine()
    for i, lora_id in ((0, "a"), (1, None), (3, "b")):
        text = TABLE["prompt"][i].as_py()
        ids = [tools.BOS, *core._endings.tokenizer.encode_batch([text], templated=False)[0][1:].tolist()]
        request = tools.requests_of([(lora_id, ids)], max_tokens=[6, 2][i == 1], ignore_eos=True)
        want = tools.generate(core, request)[0]
        assert out["generation"][i].as_py() == want.completions[0].text
        assert out["prompt_tokens"][i].as_py() == len(ids)
        assert out["adapter_sha256"][i].as_py() == want.adapter_sha256
    assert engine.generate(TABLE) == out  # and again, with the same engine


def test_polars_in_polars_out(engine: Engine) -> None:
    frame = pl.DataFrame({"prompt": ["one", "two"], "lora_id": ["a", None], "kept": [1.5, None]})
    out = engine.generate(frame)
    assert isinstance(out, pl.DataFrame)
    assert out.select(frame.columns).equals(frame)
    assert out["generation"][0] == engine.generate(TABLE)["generation"][0].as_py()


def test_lists_where_rows_ask_for_samples(engine: Engine) -> None:
    out = engine.generate(pa.table({"prompt": ["one", "two", ""], "n": [2, 1, 1], "temperature": [1.0, 0.0, 0.0]}))
    assert [len(g) if g else g for g in out["generation"].to_pylist()] == [2, 1, None]
    assert out["finish_reason"].to_pylist() == [["length"] * 2, ["length"], ["error"]]


def test_an_empty_table(engine: Engine) -> None:
    out = engine.generate(TABLE.slice(0, 0))
    assert out.num_rows == 0
    assert out.schema == engine.generate(TABLE).schema


def test_refusals(tiny: TinyModel, engine: Engine) -> None:
    with pytest.raises(UsageError, match="list"):
        engine.generate([{"prompt": "x"}])
    with pytest.raises(InputError, match="prompt"):
        engine.generate(pa.table({"text": ["x"]}))
    with pytest.raises(InputError, match="generation"):
        engine.generate(pa.table({"prompt": ["x"], "generation": ["y"]}))
    with pytest.raises(UsageError, match="model"):
        Engine(JobConfig())
    with Engine(config(tiny, on_error="raise")) as strict:
        with pytest.raises(JobError, match="row 2: empty_prompt"):
            strict.generate(TABLE.slice(0, 3))
        assert strict.generate(TABLE.slice(0, 2)).num_rows == 2  # nothing of the failed call is left


def test_a_closed_engine_says_so(tiny: TinyModel) -> None:
    with Engine(config(tiny)) as engine:
        pass
    with pytest.raises(UsageError, match="the Engine is closed: call generate inside its `with` block"):
        engine.generate(TABLE)
    engine.close()
