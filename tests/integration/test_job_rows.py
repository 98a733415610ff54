"""Bad rows become errors and touch no other row; options, samples and log-probabilities of rows that run."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_tools import ADAPTERS, MODEL, SAMPLE, Job, make_rows

GOOD = 40
FAKE = {"JOB_TEST_ENGINE": "fake"}
LIMIT = ("--max-tokens", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry of which ``broken`` holds a NaN and ``cut`` ends before its tensors do."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("broken", "cut"):
        shutil.copytree(SAMPLE / "adapters" / "topic", folder / name)
    path = folder / "broken" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-2] + b"\xc0\x7f")  # the last bfloat16
    cut = folder / "cut" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    registry = ADAPTERS.read_text().replace('"adapters/', f'"{SAMPLE}/adapters/')
    (folder / "adapters.toml").write_text(
        registry + '\n[adapters.broken]\npath = "broken"\n\n[adapters.cut]\npath = "cut"\n'
    )
    return folder


def repair(folder: Path, name: str) -> None:
    shutil.copy(SAMPLE / "adapters" / "topic" / "adapter_model.safetensors", folder / name)


def strings(values: list[bytes | None]) -> pa.Array:
    """A string column of any bytes."""
    return pa.array(values, pa.binary()).view(pa.string())


# code, and what the row has in place of good values
BAD: list[tuple[str, dict[str, Any]]] = [
    ("null_prompt", {"prompt": None}),
    ("empty_prompt", {"prompt": b"", "lora_id": b""}),
    ("prompt_too_long", {"prompt": b"word " * 2000}),
    ("invalid_utf8", {"prompt": b"caf\xe9 \xff"}),
    ("invalid_utf8", {"lora_id": b"topic\xff"}),
    ("unknown_adapter", {"lora_id": b"nobody"}),
    ("unknown_adapter", {"lora_id": b"../topic"}),
    ("adapter_unreadable", {"lora_id": b"broken"}),
    ("adapter_unreadable", {"lora_id": b"cut"}),
    ("bad_option", {"max_tokens": 0}),
    ("bad_option", {"temperature": -1.0}),
    ("bad_option", {"temperature": math.nan}),
]


def table(bad: bool) -> pa.Table:
    """Good rows, and where ``bad`` one bad row after each third of them."""
    good = make_rows(GOOD).select(["prompt", "lora_id"]).to_pylist()
    rows: list[dict[str, Any]] = []
    faults = iter(BAD if bad else [])
    for number, row in enumerate(good):
        row = {key: value.encode() if value is not None else None for key, value in row.items()}
        rows.append({"max_tokens": None, "temperature": None, **row, "code": None})
        if number % 3 == 0 and (fault := next(faults, None)):
            rows.append({**rows[-1], **fault[1], "code": fault[0]})
    assert sum(row["code"] is not None for row in rows) == len(BAD) * bad
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return pa.table({
        "prompt": strings(columns["prompt"]), "lora_id": strings(columns["lora_id"]), "code": columns["code"],
        "max_tokens": pa.array(columns["max_tokens"], pa.int64()),
        "temperature": pa.array(columns["temperature"], pa.float64()),
    })  # fmt: skip


@pytest.mark.slow
def test_bad_rows_become_errors_and_touch_no_other(folder: Path) -> None:
    pq.write_table(table(bad=True), folder / "bad.parquet")
    pq.write_table(table(bad=False), folder / "good.parquet")
    options = (*LIMIT, "--rows-per-shard", "20", "--max-errors", "40%")
    job = Job(folder, "bad/", ("bad.parquet",), options, adapters=folder / "adapters.toml")
    without = replace(job, output="good.parquet.out.parquet", inputs=("good.parquet",))
    ended = job.run("--json")
    assert ended.code == 3, ended.stderr
    assert without.run_quick().code == 0
    output = job.table()
    is_good = output["code"].is_null().to_numpy()
    names = ["generation", "finish_reason", "prompt_tokens", "completion_tokens", "error", "adapter_sha256"]
    assert output.filter(is_good).select(names).equals(without.table().select(names))

    errors = output.filter(~is_good)
    assert [error.partition(":")[0] for error in errors["error"].to_pylist()] == errors["code"].to_pylist()
    assert errors["generation"].null_count == errors["completion_tokens"].null_count == len(BAD)
    assert set(errors["finish_reason"].to_pylist()) == {"error"}
    for line in errors["error"].to_pylist():
        assert "\n" not in line
        assert "caf" not in line  # no text of the rows

    success = json.loads((job.out / "_SUCCESS").read_text())
    summary = json.loads(ended.stdout)
    counts = {code: errors["code"].to_pylist().count(code) for code, _ in BAD}
    assert success["errors"] == summary["errors_by_code"] == counts
    assert (success["rows"], success["error_rows"]) == (GOOD + len(BAD), len(BAD))
    assert job.run("-q").code == 3  # it stays as it is

    for name in ("broken", "cut"):
        repair(folder, name)
    again = replace(job, command="retry").run_quick("-q")
    assert again.code == 3, again.stderr
    output, after = output.drop("temperature"), job.table().drop("temperature")  # it holds a NaN, which equals nothing
    was_mended = np.array([code == "adapter_unreadable" for code in output["code"].to_pylist()])
    assert after.filter(~was_mended).equals(output.filter(~was_mended))
    mended = after.filter(was_mended)
    assert mended["error"].null_count == 2
    assert mended["generation"].null_count == 0
    assert len(set(mended["adapter_sha256"].to_pylist())) == 1
    assert json.loads((job.out / "_SUCCESS").read_text())["error_rows"] == len(BAD) - 2


def write(folder: Path, name: str, lora_ids: list[str | None], prompts: list[str | None] | None = None) -> None:
    prompts = prompts or [f"hello {i}" for i in range(len(lora_ids))]
    pq.write_table(pa.table({"prompt": prompts, "lora_id": pa.array(lora_ids, pa.string())}), folder / name)


def test_too_many_rows_of_bad_adapters_stop_the_job_before_any_work(folder: Path) -> None:
    write(folder, "many.parquet", ["topic"] * 90 + ["nobody"] * 10)
    job = Job(folder, "many.out.parquet", ("many.parquet",), env=FAKE)
    ended = job.run_quick("-q", "--max-errors", "9")
    assert ended.code == 4
    assert "10 of 100 rows would fail" in ended.last_line
    assert not ended.rows
    ended = job.run_quick("-q", "--max-errors", "10")
    assert ended.code == 3, ended.stderr


def test_too_many_bad_rows_stop_the_job_with_what_is_done_kept(folder: Path) -> None:
    write(folder, "nulls.parquet", [None] * 200, ["fine", None] * 100)
    job = Job(folder, "nulls.out.parquet", ("nulls.parquet",), env=FAKE)
    ended = job.run_quick("-q", "--max-errors", "20%")
    assert ended.code == 1, ended.stderr
    assert "--max-errors 20% of 200 rows allows 40" in ended.last_line
    assert "null_prompt" in ended.last_line
    ended = job.run_quick("-q", "--max-errors", "50%")
    assert ended.code == 3, ended.stderr
    assert [error is None for error in job.table()["error"].to_pylist()] == [True, False] * 100


def test_on_error_raise_stops_at_the_row_and_tries_it_again(folder: Path) -> None:
    write(folder, "raise.parquet", ["topic"] * 30)
    job = Job(folder, "raise.out.parquet", ("raise.parquet",), ("--max-num-seqs", "2", "--on-error", "raise"), FAKE)
    ended = job.run_quick("-q", env={"JOB_TEST_POISON": "11"})
    assert ended.code == 1, ended.stderr
    assert "row 11: worker_died" in ended.last_line
    assert "--on-error raise" in ended.last_line
    ended = job.run_quick("-q")
    assert ended.code == 0, ended.stderr
    assert 11 in {row for row, _ in ended.rows}
    assert job.table()["error"].null_count == 30


def test_a_repaired_adapter_makes_the_output_whole(folder: Path) -> None:
    shutil.copytree(SAMPLE / "adapters" / "topic", folder / "sick" / "one")
    shutil.copytree(SAMPLE / "adapters" / "urgency", folder / "sick" / "two")
    weights = folder / "sick" / "one" / "adapter_model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-4])
    write(folder, "sick.parquet", ["one", "two", "two"] * 20)
    job = Job(
        folder, "sick.out.parquet", ("sick.parquet",), ("--max-errors", "50%", "--rows-per-shard", "25"), FAKE,
        adapters=folder / "sick",
    )  # fmt: skip
    assert job.run_quick("-q").code == 3
    before = job.table()
    weights.write_bytes(good)
    retry = replace(job, command="retry").run_quick("-q")
    assert retry.code == 0, retry.stderr
    assert sorted(row for row, _ in retry.rows) == list(range(0, 60, 3))
    after = job.table()
    others = np.arange(60) % 3 > 0
    assert after.filter(others).equals(before.filter(others))
    assert after["error"].null_count == 60
    assert job.run_quick("-q").code == 0


@pytest.mark.slow
def test_samples_options_and_logprobs_are_the_rows_own(folder: Path) -> None:
    """Against the same rows in an engine in this process; and what each column must be."""
    rows = make_rows(24, names=("sentiment", "language", None)).select(["prompt", "lora_id"])
    rows = rows.append_column("n", pa.array([1 + i % 3 for i in range(24)], pa.int32()))
    rows = rows.append_column("max_tokens", pa.array([None if i % 4 == 0 else 1 + i % 5 for i in range(24)]))
    rows = rows.append_column("temperature", pa.array([0.0 if i % 2 else 1.0 for i in range(24)]))
    rows = rows.append_column("seed", pa.array([None if i % 3 else 5 for i in range(24)], pa.int64()))
    rows = rows.append_column("stop", pa.array([["a", "e"] if i % 6 == 5 else None for i in range(24)]))
    pq.write_table(rows, folder / "options.parquet")
    job = Job(folder, "options.out.parquet", ("options.parquet",), ("--logprobs", "3", *LIMIT))
    ended = job.run("-q", "--workers", "2")
    assert ended.code == 0, ended.stderr
    output = job.table()
    assert output.schema.field("generation").type == pa.list_(pa.large_string())

    from punica_batch import Engine, JobConfig

    with Engine(JobConfig(model=str(MODEL), adapters=str(ADAPTERS), max_tokens=6, logprobs=3, device="cpu")) as engine:
        expected = engine.generate(rows)
    for name in ("generation", "finish_reason", "prompt_tokens", "completion_tokens", "token_ids", "adapter_sha256"):
        assert output[name].to_pylist() == expected[name].to_pylist(), name

    for row in output.to_pylist():
        assert len(row["generation"]) == row["n"] == len(row["token_logprobs"])
        if not row["temperature"]:
            assert len(set(row["generation"])) == 1
        for index, ids in enumerate(row["token_ids"]):
            assert 1 <= len(ids) == row["completion_tokens"][index] <= (row["max_tokens"] or 8)
            chosen, top = row["token_logprobs"][index], row["top_logprobs"][index]
            assert len(chosen) == len(top) == len(ids)
            for token, logprob, pairs in zip(ids, chosen, top, strict=True):
                values = [pair["logprob"] for pair in pairs]
                assert values == sorted(values, reverse=True)
                assert len(values) == 3
                assert sum(map(math.exp, values)) <= 1.0001
                assert logprob <= values[0] <= 0.0
                if not row["temperature"]:
                    assert token == pairs[0]["token_id"]
            if row["stop"]:
                assert not {"a", "e"} & set(row["generation"][index])
