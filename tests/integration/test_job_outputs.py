"""Slices on several machines, remote stores, OpenAI batches, empty inputs: the same rows in every shape."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
from job_tools import ADAPTERS, HOOK, MODEL, Job, assert_carried, make_rows

from punica_batch import JobConfig, run_job

ROWS = 50
FAKE = {"JOB_TEST_ENGINE": "fake"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("outputs")
    pq.write_table(make_rows(ROWS), folder / "rows.parquet")
    job = Job(folder, "whole.parquet", options=("--rows-per-shard", "12"), env=FAKE)
    assert job.run_quick().code == 0
    return job


@pytest.mark.parametrize("output", ["slices.parquet", "slices/"])
def test_slices_on_several_machines(job: Job, output: str) -> None:
    """At the same time and one after the other; the last to finish completes the output."""
    job = replace(job, output=output)
    success = job.folder / ("slices.parquet.punica/_SUCCESS" if output == "slices.parquet" else "slices/_SUCCESS")
    with job.start("-q", "--shard", "3/3", "--max-num-seqs", "1", env={"JOB_TEST_STEP": "0.15"}) as third:
        third.until_finished(1)
        assert job.run("-q", "--shard", "3/3").code == 75
        first = job.run_quick("-q", "--shard", "1/3")
        assert first.code == 0, first.stderr
        assert third.wait().code == 0
    assert not success.exists()
    assert job.run_quick("-q", "--shard", "1/2").code in (4, 75)  # another division of the same output
    assert job.run_quick("-q", "--shard", "1/3").rows == []
    second = job.run_quick("-q", "--shard", "2/3")
    assert second.code == 0, second.stderr
    assert {row for row, _ in first.rows} == set(range(12))
    assert {row for row, _ in second.rows} == set(range(12, 36))
    assert json.loads(success.read_text())["rows"] == ROWS
    assert job.table().equals(replace(job, output="whole.parquet").table())
    again = job.run_quick("-q", "--shard", "1/3")
    assert (again.code, again.rows) == (0, [])


@pytest.fixture
def in_process(job: Job, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """For ``run_job`` in this process; its workers have the fake engine."""
    for name, value in {**FAKE, "PYTHONPATH": str(HOOK), "PUNICA_BATCH_CACHE": str(job.folder / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JOB_TEST_LOG", str(job.folder / "log"))
    return JobConfig(
        inputs=(str(job.folder / "rows.parquet"),), model=str(MODEL), adapters=str(ADAPTERS), rows_per_shard=12,
        device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_memory_input_and_output(job: Job, in_process: JobConfig, tmp_path: Path, output: str) -> None:
    store = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}"
    store.pipe(f"{root}/rows.parquet", (job.folder / "rows.parquet").read_bytes())
    url = f"memory:/{root}"
    config = in_process.model_copy(
        update={"inputs": (f"{url}/rows.parquet",), "output": f"{url}/{output}", "work_dir": str(tmp_path / "work")}
    )
    summary = run_job(config)
    assert (summary.rows, summary.exit_code, summary.already_complete) == (ROWS, 0, False)
    assert run_job(config).already_complete
    found = pq.read_table(f"{root}/{output}".rstrip("/"), filesystem=store)
    assert found.equals(replace(job, output="whole.parquet").table())


def test_run_job_outside_the_main_thread(job: Job, in_process: JobConfig, tmp_path: Path) -> None:
    summaries = []
    config = in_process.model_copy(update={"output": str(tmp_path / "out.parquet"), "workers": 2})
    thread = threading.Thread(target=lambda: summaries.append(run_job(config)))
    thread.start()
    thread.join()
    assert [summary.rows for summary in summaries] == [ROWS]
    assert pq.read_table(config.output).equals(replace(job, output="whole.parquet").table())


@pytest.mark.parametrize("output", ["none.parquet", "none/"])
def test_an_input_without_rows(job: Job, output: str) -> None:
    pq.write_table(make_rows(ROWS).slice(0, 0), job.folder / "none-rows.parquet")
    job = replace(job, output=output, inputs=("none-rows.parquet",))
    ended = job.run_quick("-q")
    assert ended.code == 0, ended.stderr
    assert job.table().num_rows == 0
    assert job.table().schema.equals(replace(job, output="whole.parquet").table().schema)
    assert job.run_quick("-q").code == 0


def test_several_files_and_partitions(job: Job) -> None:
    rows = pq.read_table(job.folder / "rows.parquet")
    for index, (start, count) in enumerate([(0, 5), (5, 0), (5, 30), (35, 15)]):
        path = job.folder / "hive" / f"day={index}" / "rows.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(rows.slice(start, count), path)
    job = replace(job, output="hive.parquet", inputs=("hive",))
    assert job.run_quick("-q", "--workers", "2").code == 0
    output = job.table()
    assert_carried(output.drop("day"), rows)
    assert output["day"].to_pylist() == [0] * 5 + [2] * 30 + [3] * 15
    whole = replace(job, output="whole.parquet").table()
    assert output["generation"].equals(whole["generation"])


@pytest.mark.slow
def test_openai_batch_in_and_out(job: Job) -> None:
    """Real engine: a request answers as the same row of a Parquet job does; a bad line answers with an error."""
    rows = make_rows(12, names=("sentiment", "topic")).select(["prompt", "lora_id"])
    pq.write_table(rows, job.folder / "plain.parquet")
    lines = [
        {"custom_id": f"q{i}", "method": "POST", "url": "/v1/completions", "body": {
            "model": row["lora_id"], "prompt": row["prompt"], "max_tokens": 5}}
        for i, row in enumerate(rows.to_pylist())
    ]  # fmt: skip
    lines.insert(3, {"custom_id": "bad", "method": "POST", "url": "/v1/images", "body": {"model": "topic"}})
    (job.folder / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    real = replace(job, env={})
    batch = replace(real, output="answers.jsonl", inputs=("batch.jsonl",))
    assert batch.run_quick("-q", "--max-errors", "1").code == 3
    answers = [json.loads(line) for line in batch.out.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    assert answers[3]["error"]["code"] == "unsupported_request"
    assert answers[3]["response"] is None
    plain = replace(real, output="plain.out.parquet", inputs=("plain.parquet",))
    assert plain.run_quick("-q", "--config", str(_max_tokens(job.folder))).code == 0
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers if answer["response"]]
    assert texts == plain.table()["generation"].to_pylist()


def _max_tokens(folder: Path) -> Path:
    path = folder / "five.toml"
    path.write_text("max_tokens = 5\n")
    return path
