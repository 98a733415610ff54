"""``plan``, ``validate``, ``adapters`` and the check before a run, on a small job with known faults."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapter_files import lora_tensors
from job_files import config_of, run_json, stay_in, write_job, write_rows
from tokenizers import Tokenizer as Backend

from punica_batch import cli
from punica_batch.data.cursor import READ_ROWS, Cursor
from punica_batch.data.source import Source
from punica_batch.models.config import ModelConfig
from punica_batch.planning.memory import resolve_dtypes, slot_bytes, worker_memory, workspace_bytes
from punica_batch.planning.opened import open_job, shard_rows
from punica_batch.planning.overview import make_plan
from punica_batch.planning.preflight import check_reports, count_adapters, preflight
from punica_batch.planning.sample import SAMPLE_ROWS, sample_rows, stretches
from punica_batch.types import AdapterSpec
from punica_batch.workers.devices import Device


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stay_in(tmp_path, monkeypatch)
    return write_job(tmp_path)


def test_plan_counts_what_a_count_by_hand_gives(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(["plan", str(job), "--device", "cpu", "--workers", "2"], capsys)
    table = pq.read_table(job)
    backend = Backend.from_file(str(job.parent / "model" / "tokenizer.json"))
    good = [row for row in table.to_pylist() if row["lora_id"] not in ("wrong", "nobody") and row["prompt"] is not None]
    lengths = [len(backend.encode(row["prompt"]).ids) for row in good]
    assert plan["schema_version"] == 1
    assert plan["rows"] == 100
    assert plan["samples"] == len(good) == 95
    assert plan["tokens"] == {
        "prompt_tokens": sum(lengths), "mean_prompt_tokens": pytest.approx(np.mean(lengths), abs=0.01),
        "max_prompt_tokens": max(lengths), "sampled_rows": 95, "exact": True, "max_generated_tokens": 95 * 8,
    }  # fmt: skip
    assert plan["adapters"]["count"] == 4
    assert plan["adapters"]["base_rows"] == 16
    assert plan["adapters"]["ranks"] == {"2": 1, "4": 1}
    assert [(entry["lora_id"], entry["rows"]) for entry in plan["adapters"]["top"]] == [
        ("good", 60), ("wide", 20), ("wrong", 3), ("nobody", 1),
    ]  # fmt: skip
    assert plan["errors"] == {
        "rows": 5, "by_code": {"adapter_unreadable": 3, "null_prompt": 1, "unknown_adapter": 1}, "limit": 5,
        "stops": False, "allowance": "--max-errors 5% of 100 rows allows 5",
    }  # fmt: skip
    assert plan["placement"]["names"] == ["0", "1"]
    (preview,) = plan["previews"]
    expected = backend.encode("hello there")
    assert [(t["id"], t["token"]) for t in preview["tokens"]] == list(zip(expected.ids, expected.tokens, strict=True))
    assert plan["inputs"] == [{"path": str(job), "nbytes": job.stat().st_size, "rows": 100}]


def test_plan_for_people_names_the_faults(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["plan", str(job), "--device", "cpu", "--max-errors", "1"]) == 0
    out = capsys.readouterr().out
    assert "95 answers, at most 760 tokens" in out
    assert "4 (1 of rank 2, 1 of rank 4, 2 missing or bad), 16 rows for the base model" in " ".join(out.split())
    assert "use_dora is not supported" in out
    assert "the registry has no adapter 'nobody' (1 row)" in out
    assert "run would stop: 5 rows would fail, --max-errors allows 1" in out
    assert "⟨0 <|begin|>⟩" in out


def test_plan_shows_the_rest_when_memory_does_not_suffice(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("punica_batch.workers.devices.available_memory", lambda: 1 << 20)
    plan = make_plan(config_of(job))
    assert plan.memory is None
    assert any(line.startswith("run would stop: the model needs") for line in plan.warnings)
    assert plan.adapters.count == 4


def test_plan_of_a_large_input_is_a_sample_spread_over_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = 30_000
    short, long = "hello", "hello hello hello hello hello hello hello"
    prompts = [short if i < rows // 2 else long for i in range(rows)]
    prompts[0] = long
    many = write_rows(job.parent / "many.parquet", ["good"] * (rows - 30) + ["nobody"] * 30, prompts)
    plan = run_json(["plan", str(many), "--device", "cpu"], capsys)
    exact = run_json(["plan", str(many), "--device", "cpu", "--exact"], capsys)
    assert not plan["tokens"]["exact"]
    assert plan["tokens"]["sampled_rows"] <= SAMPLE_ROWS
    assert exact["tokens"]["exact"]
    assert plan["tokens"]["prompt_tokens"] == pytest.approx(exact["tokens"]["prompt_tokens"], rel=0.05)
    assert plan["adapters"]["top"] == exact["adapters"]["top"]  # counted, not sampled
    assert plan["adapters"]["problems"][0]["rows"] == 30


def test_a_sample_of_one_huge_row_group_decodes_it_once_and_ends_in_time(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = write_rows(job.parent / "many.parquet", ["good"] * 150_000, ["hello"] * 150_000)
    assert pq.read_metadata(many).num_row_groups == 1
    opened = open_job(config_of(many))
    found = preflight(opened, 0, 150_000)
    decoded = 0
    next_batch = Cursor._next_batch

    def counted(cursor: Cursor) -> pa.RecordBatch:
        nonlocal decoded
        decoded += cursor._left is None
        return next_batch(cursor)

    monkeypatch.setattr(Cursor, "_next_batch", counted)
    whole = sample_rows(opened, found, 0, 150_000, exact=False)
    assert whole.rows == SAMPLE_ROWS
    assert decoded <= 150_000 // READ_ROWS + 1
    clock = iter(range(1000))  # each look at it takes a second
    monkeypatch.setattr("punica_batch.planning.sample.time", SimpleNamespace(monotonic=lambda: next(clock)))
    cut = sample_rows(opened, found, 0, 150_000, exact=False)
    assert 0 < cut.rows < SAMPLE_ROWS
    assert not cut.exact


@pytest.mark.parametrize("rows", [0, 1, SAMPLE_ROWS, SAMPLE_ROWS + 1, 2_000_000])
def test_stretches_are_disjoint_and_reach_both_ends(rows: int) -> None:
    ranges = list(stretches(7, 7 + rows))
    numbers = [row for first, last in ranges for row in range(first, last)]
    assert len(set(numbers)) == min(rows, SAMPLE_ROWS)
    if rows > SAMPLE_ROWS + 1:
        assert len(numbers) == SAMPLE_ROWS
    assert all(7 <= row < 7 + rows for row in numbers)
    if rows:
        assert min(numbers) == 7
        assert max(numbers) == 6 + rows


@pytest.mark.parametrize(("rows", "size", "count"), [(0, 10, 3), (95, 10, 3), (100, 10, 8), (5, 10, 4), (1000, 1, 7)])
def test_shards_are_whole_parts_and_cover_every_row_once(job: Path, rows: int, size: int, count: int) -> None:
    shards = [shard_rows(config_of(job, shard=f"{i + 1}/{count}", rows_per_shard=size), rows) for i in range(count)]
    assert [row for first, last in shards for row in range(first, last)] == list(range(rows))
    assert all(first % size == 0 or first == rows for first, _ in shards)
    assert shard_rows(config_of(job), rows) == (0, rows)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_adapters_are_counted_whatever_their_column_is(job: Path, kind: pa.DataType) -> None:
    rng = np.random.default_rng(0)
    names = [None, "", "a", "b", "한국"]
    lora_ids = [names[i] for i in rng.integers(0, len(names), 5000)]
    table = pa.table({"prompt": ["x"] * 5000, "lora_id": pa.array(lora_ids, pa.string()).cast(kind)})
    pq.write_table(table, job.parent / "x.parquet", row_group_size=700)
    config = config_of(job.parent / "x.parquet")
    use = count_adapters(Source.open(config), config, 100, 4900)
    assert use.rows == dict(Counter(name or None for name in lora_ids[100:4900]))
    assert use.exact
    assert use.names() == sorted(("a", "b", "한국"), key=lambda name: (-use.rows[name], name))


def test_counting_stops_in_time(job: Path) -> None:
    rows = write_rows(job.parent / "many.parquet", ["good"] * 200_000, ["x"] * 200_000)
    config = config_of(rows)
    use = count_adapters(Source.open(config), config, 0, 200_000, seconds=0.0)
    assert 0 < use.counted < 200_000
    assert not use.exact


def test_a_job_without_an_adapter_column_is_all_base_rows(job: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 9}), job.parent / "x.parquet")
    config = config_of(job.parent / "x.parquet")
    assert count_adapters(Source.open(config), config, 0, 9).rows == {None: 9}


def test_sampled_errors_leave_out_those_of_adapters(job: Path) -> None:
    opened = open_job(config_of(job, n=3))
    sample = sample_rows(opened, preflight(opened, 0, 100), 0, 100, exact=False)
    assert sample.errors == {"null_prompt": 1}
    assert sample.rows == 100
    assert sample.exact
    assert set(sample.samples) == {3}
    assert sum(sample.generated_tokens) == 95 * 8 * 3


def test_memory_is_planned_from_true_sizes(job: Path) -> None:
    model = ModelConfig.from_folder(job.parent / "model")
    config = config_of(job)
    assert resolve_dtypes(config, model.torch_dtype, "cuda").model == "bfloat16"
    wide = resolve_dtypes(config_of(job, dtype="float32"), model.torch_dtype, "cuda")
    assert resolve_dtypes(config, model.torch_dtype, "cpu") == wide
    assert resolve_dtypes(config_of(job, kv_cache_dtype="float16"), model.torch_dtype, "cpu").kv_cache == "float16"
    specs = {"wide": AdapterSpec("wide", str(job.parent / "adapters" / "wide"))}
    report = check_reports(specs, config, model)["wide"]
    assert slot_bytes(report, model, "float32") == sum(tensor.nbytes for tensor in lora_tensors(4).values())
    opened = open_job(config)
    plan = worker_memory(opened, preflight(opened, 0, 100), Device("0", "cpu", 4 << 30), [16] * 10, 95)
    assert plan.total_bytes == int((4 << 30) * 0.9)
    assert plan.weight_bytes == model.weight_bytes("float32")
    assert plan.max_loras == 2
    assert plan.max_num_seqs == 95
    assert workspace_bytes(model, 2048, 256, "float32", "cpu") < 1 << 30


def test_adapters_that_could_not_be_counted_are_planned_for(job: Path) -> None:
    """Rows may name any of the registry's, of a rank that nobody has seen: room for one of the highest, all slots."""
    opened = open_job(config_of(job, max_lora_rank=64))
    found = preflight(opened, 0, 100)
    met = {name: spec for name, spec in found.specs.items() if name != "wide"}
    some = dataclasses.replace(found, specs=met, use=dataclasses.replace(found.use, exact=False))
    device = Device("0", "cuda", 8 << 30)
    linear = sum(sum(shape) for name, shape in opened.model.lora_modules().items() if ".layers." in name)
    assert worker_memory(opened, found, device, [16] * 10, 95).adapter_bytes < 64 * linear * 2
    plan = worker_memory(opened, some, device, [16] * 10, 95)
    assert plan.adapter_bytes >= 64 * linear * 2
    assert plan.max_loras >= len(opened.registry.names()) - len(found.errors)
