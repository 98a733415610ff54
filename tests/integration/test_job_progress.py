"""What a run says on the way and at its end: every phase, and the same figures everywhere."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from job_tools import Job, make_rows

ROWS = 60
FAKE = {"JOB_TEST_ENGINE": "fake"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("progress")
    pq.write_table(make_rows(ROWS, names=("topic", None, "nobody")), folder / "rows.parquet")
    options = ("--rows-per-shard", "25", "--max-num-seqs", "8", "--max-errors", "100%")
    return Job(folder, "whole.parquet", options=options, env=FAKE)


def phases(stderr: str) -> list[str]:
    """Of the progress lines, each once where it is repeated."""
    found = re.findall(r"^(planning|starting|running|stopping|stopped|assembling|done)\b", stderr, re.M)
    return [phase for i, phase in enumerate(found) if found[i - 1 : i] != [phase]]


def assert_same_end(stdout: str, stderr: str) -> None:
    """The last progress line and the summary agree on rate, time and errors."""
    shown = re.search(r"^done: .*?([\d.k]+) tok/s, (\d+:\d\d) elapsed, (\d+) errors? \((.*)\)$", stderr, re.M)
    assert shown, stderr
    rate, elapsed, number, codes = shown.groups()
    assert f"{elapsed} ({rate} generated tok/s)" in stdout
    assert re.search(rf"^errors +{number} \({re.escape(codes)}\)$", stdout, re.M), stdout


def test_a_short_run_shows_every_phase_and_so_does_its_retry(job: Job) -> None:
    ended = job.run_quick()
    assert ended.code == 3, ended.stderr
    assert phases(ended.stderr) == ["planning", "starting", "running", "assembling", "done"]
    assert_same_end(ended.stdout, ended.stderr)
    assert "this run" not in ended.stdout
    errors = job.table()["error"].drop_null().to_pylist()
    retried = replace(job, command="retry").run_quick()
    assert retried.code == 3, retried.stderr
    assert phases(retried.stderr)[-1] == "done"
    assert_same_end(retried.stdout, retried.stderr)
    assert re.search(rf"^done: {len(errors)} of {len(errors)} rows", retried.stderr, re.M)
    assert f"this run  {len(errors)} rows; tokens:" in retried.stdout


def test_a_stop_says_so_with_the_grace_and_ends_on_the_final_numbers(job: Job) -> None:
    job = replace(job, output="stopped.parquet")
    with job.start("--grace", "9", env={"JOB_TEST_STEP": "0.3"}) as running:
        running.until_finished(10)
        running.process.send_signal(signal.SIGTERM)
        ended = running.wait()
    assert ended.code == 75, ended.stderr
    assert phases(ended.stderr)[-2:] == ["stopping", "stopped"]
    stopping = next(line for line in ended.stderr.splitlines() if line.startswith("stopping"))
    assert re.search(r"^stopping \(SIGTERM\): .* [67] s of grace left.*, a second signal ends at once$", stopping)
    assert "ETA" not in stopping
    last, final = re.findall(r"^stopped: (\d+) of|with (\d+) of", ended.stderr, re.M)[-2:]
    assert last[0] == final[1], ended.stderr
    resumed = job.run_quick()
    assert f"this run  {ROWS - int(last[0])} rows; tokens:" in resumed.stdout
    assert f"{last[0]} of them done before" in resumed.stderr


def test_a_shard_without_rows_says_so(job: Job) -> None:
    job = replace(job, output="shards.parquet")
    ended = job.run_quick("--shard", "1/5")
    assert ended.code == 0, ended.stderr
    assert "warning: this shard has no rows" in ended.stdout
    assert "complete before" not in ended.stdout
