"""A run that is told to stop, or must, says so with its exit code, keeps what is done, and goes on when told again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_tools import ADAPTERS, MODEL, NAMES, SAMPLE, Job, durable_rows, is_alive, make_rows

ROWS = 120
SLOW = {"JOB_TEST_STEP": "0.3"}  # about 13 seconds for all rows


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("stop")
    pq.write_table(make_rows(ROWS), folder / "rows.parquet")
    options = ("--rows-per-shard", "25", "--max-num-seqs", "8")
    job = Job(folder, "whole.parquet", options=options, env={"JOB_TEST_ENGINE": "fake"})
    assert job.run_quick().code == 0
    return job


def assert_continues(job: Job, *options: str) -> None:
    """The same command (with ``options`` that may change) completes the output without running durable rows again."""
    durable = durable_rows(job.out, is_folder=False)
    ended = job.run_quick(*options)
    assert ended.code == 0, ended.stderr
    rows = [row for row, _ in ended.rows]
    assert sorted([*rows, *durable]) == list(range(ROWS))
    assert job.table().equals(replace(job, output="whole.parquet").table())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_75_within_the_grace(job: Job, number: signal.Signals) -> None:
    """Rows that run may finish, those that wait are not begun."""
    job = replace(job, output=f"{number.name}.parquet")
    with job.start("--grace", "6", env=SLOW) as running:
        running.until_finished(10)
        running.process.send_signal(number)
        began = time.monotonic()
        ended = running.wait()
        assert time.monotonic() - began < 6.0
        assert ended.code == 75, ended.stderr
        assert number.name in ended.last_line
        assert "run the same command again" in ended.last_line
        assert not any(map(is_alive, running.children("")))
    durable = durable_rows(job.out, is_folder=False)
    assert durable == {row for row, _ in ended.rows}
    assert len(durable) < ROWS / 2
    assert_continues(job)


def test_rows_that_outlast_the_grace_are_left(job: Job) -> None:
    job = replace(job, output="short.parquet")
    with job.start("--grace", "2.5", env={"JOB_TEST_STEP": "3"}) as running:
        running.until_finished(1)
        running.process.terminate()
        began = time.monotonic()
        ended = running.wait()
        assert time.monotonic() - began < 2.5
    assert ended.code == 75, ended.stderr
    assert_continues(job)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it_at_once(job: Job, number: signal.Signals, code: int) -> None:
    job = replace(job, output=f"twice-{code}.parquet")
    with job.start(env={"JOB_TEST_STEP": "3"}) as running:
        running.until_finished(1)
        children = running.children("")
        running.process.send_signal(number)
        time.sleep(0.5)
        running.process.send_signal(number)
        began = time.monotonic()
        assert running.wait().code == code
        assert time.monotonic() - began < 1.0
        time.sleep(1.0)
        assert not any(map(is_alive, children))
    assert_continues(job)


def test_a_signal_before_the_first_row_ends_the_run(job: Job) -> None:
    """In its planning, while nothing polls for signals."""
    job = replace(job, output="early.parquet")
    with job.start(env=SLOW) as running:
        running.until(lambda: "planning" in running.stderr())
        running.process.terminate()
        ended = running.wait(5.0)
    assert ended.code == 75, ended.stderr
    assert "SIGTERM" in ended.last_line
    assert_continues(job)


def test_max_runtime(job: Job) -> None:
    job = replace(job, output="limit.parquet")
    ended = job.run_quick("--max-runtime", "2", "--grace", "5", env=SLOW)
    assert ended.code == 75, ended.stderr
    assert "--max-runtime" in ended.last_line
    assert 0 < len(ended.rows) < ROWS
    assert_continues(job)


def test_one_run_at_a_time(job: Job) -> None:
    job = replace(job, output="locked.parquet")
    with job.start(env=SLOW) as running:
        running.until_finished(1)
        second = job.run("-q")
        assert second.code == 75
        assert f"process {running.process.pid} " in second.stderr
        assert second.stderr.count("\n") == 1
    assert_continues(job)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs rights that this process does not have")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk(job: Job, small_disk: Path) -> None:
    """Full at the plan, in the journal, in a part, in the assembled file: exit 75 each time, then on from there."""
    whole = replace(job, output="whole.parquet").table()
    job = replace(job, output=str(small_disk / "x.parquet"), options=("--rows-per-shard", "60"))
    refused = []
    for pages in range(1, 40):
        subprocess.run(["mount", "-o", f"remount,size={pages * 4}k", small_disk], check=True)
        ended = job.run_quick("-v")
        if ended.code == 0:
            break
        assert ended.code == 75, ended.stderr
        assert "no room on the disk" in ended.last_line
        assert not job.out.exists() or job.table().equals(whole)
        refused.append(ended.last_line)
    assert job.table().equals(whole)
    for what in ("plan.json", "journal/", "part-00000.parquet", "x.parquet.tmp", "_SUCCESS"):
        assert any(what in line for line in refused), refused


def test_a_finished_output_is_left_alone(job: Job) -> None:
    """Exit 0, no worker is started, nothing is written."""
    before = job.out.stat()
    ended = job.run("-v", env={"JOB_TEST_START": "exit"})
    assert ended.code == 0, ended.stderr
    assert "starting" not in ended.stderr
    assert job.out.stat().st_mtime_ns == before.st_mtime_ns


@pytest.fixture(scope="module")
def begun(job: Job) -> Job:
    """A job that was stopped in the middle, all of whose files may be changed."""
    folder = job.folder / "begun"
    shutil.copytree(SAMPLE / "adapters", folder / "adapters")
    shutil.copy(ADAPTERS, folder / "adapters.toml")
    shutil.copytree(MODEL, folder / "model")
    shutil.copy(job.folder / "rows.parquet", folder)
    job = replace(job, folder=folder, output="out.parquet", model=folder / "model", adapters=folder / "adapters.toml")
    with job.start(env=SLOW) as running:
        running.until_finished(40)
        running.process.terminate()
        assert running.wait().code == 75
    return job


CHANGES = [
    ["--max-tokens", "9"], ["--temperature", "0.5"], ["--seed", "3"], ["--rows-per-shard", "30"], ["--limit", "50"],
    ["--n", "2"], ["--overlong", "truncate-left"], ["--columns", "id"], ["--dtype", "float16"],
    ["--max-model-len", "256"], ["--stop", "x"],
]  # fmt: skip


@pytest.mark.parametrize("option", CHANGES, ids=lambda option: option[0].strip("-"))
def test_a_changed_option_is_refused(begun: Job, option: list[str]) -> None:
    """By the flag's name."""
    ended = begun.run_quick("-q", *option)
    assert ended.code == 4, ended.stderr
    assert option[0] in ended.last_line
    assert ended.stderr.count("\n") == 1
    assert not ended.rows


def test_a_changed_file_is_refused(begun: Job) -> None:
    """Input, adapter, registry entry, model, tokenizer."""
    rows, table = begun.folder / "rows.parquet", pq.read_table(begun.folder / "rows.parquet")
    ran = {table["lora_id"][row].as_py() for row in durable_rows(begun.out, is_folder=False)}
    name = next(name for name in NAMES if name in ran)
    adapter = begun.folder / "adapters" / name / "adapter_model.safetensors"
    other = adapter.read_bytes()[:-1] + bytes([adapter.read_bytes()[-1] ^ 1])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables([table.slice(1), table.slice(0, 1)]), sink)
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    changes = {
        rows: (sink.getvalue().to_pybytes(), "rows.parquet"),
        adapter: (other, name),
        begun.adapters: (begun.adapters.read_bytes().replace(b"### Answer", b"### Reply"), "adapter"),
        begun.model / "model.safetensors": ((MODEL / "model.safetensors").read_bytes()[:-1] + b"\\1", "model"),
        begun.model / "tokenizer_config.json": (json.dumps({**config, "add_bos_token": True}).encode(), "tokenizer"),
    }
    for path, (content, wanted) in changes.items():
        kept, stat = path.read_bytes(), path.stat()
        path.write_bytes(content)
        ended = begun.run_quick("-q")
        path.write_bytes(kept)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert ended.code == 4, (path, ended.stderr)
        assert wanted in ended.last_line
        assert not ended.rows


def test_other_options_may_change(begun: Job) -> None:
    options = ["--workers", "2", "--max-num-seqs", "3", "--pack", "spread", "--max-errors", "50%", "--max-loras", "2"]
    more = ["--block-size", "8", "--max-num-batched-tokens", "600", "--grace", "3", "--on-error", "raise"]
    ended = begun.run_quick(*options, *more)
    assert ended.code == 0, ended.stderr
    whole = begun.folder.parent / "whole.parquet"
    assert begun.table().equals(pq.read_table(whole))


def test_the_parent_never_imports_torch(job: Job, tmp_path: Path) -> None:
    """Checked when a whole run is over."""
    job = replace(job, output="torch.parquet")
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from punica_batch.cli import execute\n"
        "code = execute(sys.argv[1:])\n"
        "print(code, sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), *job.arguments("-q")], env=job.environment(), capture_output=True, text=True
    )
    assert done.stdout.endswith("0 []\n"), (done.stdout, done.stderr)
