"""Worker processes die, are killed, kill themselves, cannot start, or lose their parent: no row is lost or doubled."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import replace

import psutil
import pyarrow.parquet as pq
import pytest
from job_tools import RESULTS, Job, assert_carried, durable_rows, is_alive, make_rows, with_gone

from punica_batch import JobConfig, run_job
from punica_batch.workers import pool

ROWS = 120
TEXT_WORKER = "punica_batch.workers.text_worker"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("workers")
    pq.write_table(make_rows(ROWS), folder / "rows.parquet")
    options = ("--rows-per-shard", "50", "--max-num-seqs", "8", "--max-errors", "20%")
    job = Job(folder, "whole.parquet", options=options, env={"JOB_TEST_ENGINE": "fake"})
    ended = job.run_quick()
    assert ended.code == 0, ended.stderr
    return job


def assert_whole(job: Job) -> None:
    """All rows as in the undisturbed run."""
    assert job.table().equals(replace(job, output="whole.parquet").table())
    assert_carried(job.table(), pq.read_table(job.folder / "rows.parquet"))


def test_killed_workers_are_restarted_and_no_row_is_lost_or_doubled(job: Job) -> None:
    job = replace(job, output="kills.parquet")
    with job.start("--workers", "2", env={"JOB_TEST_STEP": "0.05"}) as running:
        running.until_finished(10)
        for victim in running.children():
            victim.send_signal(signal.SIGKILL)
        running.until_finished(30)
        for text in running.children(TEXT_WORKER):
            text.send_signal(signal.SIGKILL)
        running.until(running.children)
        running.until_finished(50)
        running.children()[0].send_signal(signal.SIGKILL)
        ended = running.wait()
    assert ended.code == 0, ended.stderr
    assert "killed by SIGKILL" in ended.stderr
    assert_whole(job)


def test_a_text_worker_killed_over_one_row_costs_no_row(job: Job) -> None:
    """The whole job is one chunk of one row: the kill says nothing about it."""
    job = replace(job, output="text.parquet", options=("--limit", "1"))
    with job.start() as running:
        for text in running.until(lambda: running.children(TEXT_WORKER)):
            text.send_signal(signal.SIGKILL)
        ended = running.wait()
    assert ended.code == 0, ended.stderr
    assert job.table()["error"].to_pylist() == [None]


def test_a_killed_parent_takes_its_workers_along_and_the_same_command_continues(job: Job) -> None:
    """At random times, again and again."""
    job, rng = replace(job, output="parent.parquet"), random.Random(7)
    ran: list[int] = []
    durable: set[int] = set()
    for _ in range(4):
        with job.start("--workers", "2", env={"JOB_TEST_STEP": "0.3"}) as running:
            running.until(lambda running=running: len(running.children("workers.")) == 3)
            time.sleep(rng.uniform(0.0, 2.0))
            children = running.children("")
            running.process.kill()
            deadline = time.monotonic() + 2.0
            while any(map(is_alive, children)) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not [with_gone(child.cmdline) for child in children if is_alive(child)]
            rows = [row for row, _ in job.log()]
        assert not durable & set(rows)
        ran += rows
        durable = durable_rows(job.out, is_folder=False)
    ended = job.run("--workers", "2")
    assert ended.code == 0, ended.stderr
    assert not durable & {row for row, _ in ended.rows}
    assert_whole(job)


@pytest.mark.slow
def test_rows_are_durable_within_seconds_of_finishing(job: Job) -> None:
    """Though the run goes on, and no part is complete."""
    job = replace(job, output="seconds.parquet", options=("--rows-per-shard", "1000", "--max-num-seqs", "2"))
    with job.start(env={"JOB_TEST_STEP": "0.1"}) as running:
        running.until_finished(60)
        at = time.time()
        running.process.kill()
        running.process.wait()
        rows = job.log()
    durable = durable_rows(job.out, is_folder=False)
    assert {row for row, finished in rows if finished < at - 4.0} <= durable
    assert len(durable) >= 20
    assert not durable & {row for row, _ in job.run_quick().rows}
    assert_whole(job)


@pytest.mark.slow
def test_the_trained_sample_survives_kills_of_workers_and_parent(job: Job) -> None:
    """The real engine: the same answers as without kills, but for near-ties between tokens."""
    options = ("--max-tokens", "6", "--rows-per-shard", "40", "--max-num-seqs", "16")
    whole = replace(job, output="real.parquet", options=options, env={})
    assert whole.run_quick("-q").code == 0
    killed = replace(whole, output="real-killed.parquet")
    with killed.start("-q", "--workers", "2") as running:
        running.until_finished(20)
        running.children()[0].send_signal(signal.SIGKILL)
        running.until_finished(40)
        running.process.kill()
        running.process.wait()
    durable = durable_rows(killed.out, is_folder=False)
    ended = killed.run_quick("-q")
    assert ended.code == 0, ended.stderr
    assert sorted([*durable, *(row for row, _ in ended.rows)]) == list(range(ROWS))
    got, wanted = killed.table(), whole.table()
    assert_carried(got, pq.read_table(job.folder / "rows.parquet"))
    for name in ("prompt_tokens", "error", "adapter_sha256"):
        assert got[name].equals(wanted[name])
    differ = sum(a != b for a, b in zip(got["generation"].to_pylist(), wanted["generation"].to_pylist(), strict=True))
    assert differ <= 1


@pytest.mark.parametrize(
    ("how", "died"),
    [
        ("POISON", "killed by SIGKILL"),
        ("CUDA", "exit status 1: RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_row_that_kills_its_worker_is_isolated(job: Job, how: str, died: str) -> None:
    """By a signal, or by an error of the GPU, after which a process can do nothing more with it."""
    poison = {17, 63}
    job = replace(job, output=f"poison-{how}.parquet")
    ended = job.run_quick("--workers", "2", env={f"JOB_TEST_{how}": "17,63"})
    assert ended.code == 3, ended.stderr
    whole = replace(job, output="whole.parquet").table().to_pylist()
    for row, (got, wanted) in enumerate(zip(job.table().to_pylist(), whole, strict=True)):
        if row not in poison:
            assert got == wanted
            continue
        assert got["error"].startswith("worker_died: ")
        assert (got["generation"], got["finish_reason"]) == (None, "error")
        assert {k: v for k, v in got.items() if k not in RESULTS} == {
            k: v for k, v in wanted.items() if k not in RESULTS
        }
    assert 1 <= ended.stderr.count(f"died ({died})") <= 2 * (4 + 4)  # 2 + log2(a batch and its backlog) each


@pytest.mark.parametrize(("how", "code", "line"), [("exit", 1, "did not come up"), ("error", 4, "tensor missing")])
def test_a_worker_that_cannot_start_ends_the_job_with_one_line(job: Job, how: str, code: int, line: str) -> None:
    ended = replace(job, output=f"start-{how}.parquet").run_quick("-q", env={"JOB_TEST_START": how})
    assert ended.code == code
    assert line in ended.last_line
    assert ended.stderr.count("\n") == 1
    if how == "exit":
        assert "Illegal instruction" in ended.last_line


def test_a_store_that_is_away_stops_the_job_and_condemns_no_row(job: Job) -> None:
    job = replace(job, output="away.parquet")
    ended = job.run_quick(env={"JOB_TEST_AWAY": "40"})
    assert ended.code == 75, ended.stderr
    assert "does not answer" in ended.last_line
    assert "died" not in ended.stderr
    assert job.run_quick().code == 0
    assert_whole(job)


def test_two_workers_share_the_rows(job: Job) -> None:
    job = replace(job, output="two.parquet")
    ended = job.run_quick("--workers", "2", "--pack", "spread", "--json", env={"JOB_TEST_STEP": "0.02"})
    assert ended.code == 0, ended.stderr
    assert sorted(row for row, _ in ended.rows) == list(range(ROWS))
    assert len(job.rows_by_worker()) == 2
    assert_whole(job)


def test_a_worker_that_hangs_is_killed_and_its_rows_run_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped in the middle: neither dead nor alive."""
    job = replace(job, output="hang.parquet")
    for name, value in job.environment({"JOB_TEST_STEP": "0.05"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pool, "SILENCE_SECONDS", 2.0)
    stopped: list[int] = []

    def stop_the_worker() -> None:
        while len(job.log()) < 10:
            time.sleep(0.02)
        for child in psutil.Process().children(recursive=True):
            if any(part == "punica_batch.workers.worker" for part in with_gone(child.cmdline) or []):
                child.suspend()
                stopped.append(child.pid)

    (job.folder / "log").unlink(missing_ok=True)
    thread = threading.Thread(target=stop_the_worker, daemon=True)
    thread.start()
    config = JobConfig(
        inputs=(str(job.folder / "rows.parquet"),), output=str(job.out), model=str(job.model),
        adapters=str(job.adapters), device="cpu", rows_per_shard=50, max_num_seqs=8, max_errors="20%",
    )  # fmt: skip
    assert run_job(config).rows_done == ROWS
    assert stopped
    assert_whole(job)
