"""The command line as a process sees it: flags, errors, exit codes, speed, pipes, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_process import process

import punica_batch.job.runner
from punica_batch import cli
from punica_batch.config import JobConfig
from punica_batch.errors import BindingError, JobError, OutputLocked, PunicaError, RowError, UsageError, ValidationError
from punica_batch.progress import JobSummary


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("PUNICA_BATCH_MODEL", "PUNICA_BATCH_ADAPTERS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def jobs(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    """The configs of the jobs that ran; each ends with the same summary."""
    seen: list[JobConfig] = []

    def run_job(config: JobConfig, progress: Any = None) -> JobSummary:
        seen.append(config)
        progress.note("one CPU worker")
        return JobSummary("x.generations.parquet", rows=3, rows_done=3, rows_error=1, errors_by_code={"overlong": 1})

    monkeypatch.setattr(punica_batch.job.runner, "run_job", run_job, raising=False)
    return seen


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_job(config: JobConfig, progress: Any = None) -> JobSummary:
        raise error

    monkeypatch.setattr(punica_batch.job.runner, "run_job", run_job, raising=False)


def test_flags_reach_the_job(jobs: list[JobConfig], capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "run a.parquet b/*.parquet -o out/ --model m --revision r --tokenizer t --dtype float32 --adapters ad "
        "--lora-modules a=x --lora-modules b=y=z --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 "
        "--seed 7 --n 2 --logprobs 4 --ignore-eos --no-apply-chat-template --columns a,b --columns c --gpus 0,2,3 "
        "--storage-option key=v --max-errors 3 --shard 2/8 --overwrite --max-runtime 60 --grace 3"
    )
    assert cli.execute([*line.split(), "--stop", "\n", "--stop", "a,b ", "-q"]) == 3
    assert jobs == [
        JobConfig(
            inputs=("a.parquet", "b/*.parquet"), output="out/", model="m", revision="r", tokenizer="t", dtype="float32",
            adapters="ad", lora_modules={"a": "x", "b": "y=z"}, max_tokens=5, temperature=0.5, top_p=0.9, top_k=3,
            min_p=0.1, seed=7, n=2, logprobs=4, ignore_eos=True, apply_chat_template=False, columns=("a", "b", "c"),
            gpus="0,2,3", storage_options={"key": "v"}, max_errors="3", shard="2/8", overwrite=True, max_runtime=60,
            grace=3, stop=("\n", "a,b "),
        )
    ]  # fmt: skip


def test_flag_beats_environment_beats_job_file(
    jobs: list[JobConfig], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "punica-batch.toml").write_text('model = "./a"\nadapters = "./a"\nmax_tokens = 1\nignore_eos = true\n')
    monkeypatch.setenv("PUNICA_BATCH_ADAPTERS", "b")
    cli.execute(["run", "x.parquet", "--max-tokens", "2", "--no-ignore-eos"])
    (config,) = jobs
    assert (config.model, config.adapters, config.max_tokens, config.ignore_eos) == ("a", "b", 2, False)


def test_inputs_may_come_from_the_job_file(jobs: list[JobConfig], here: Path) -> None:
    (here / "j.toml").write_text('inputs = ["x.parquet"]\n')
    assert cli.execute(["run", "--config", "j.toml"]) == 3
    assert jobs[0].inputs == ("x.parquet",)


def test_results_go_to_stdout_and_progress_to_stderr(jobs: list[JobConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["run", "x.parquet"]) == 3
    out, err = capsys.readouterr()
    assert "x.generations.parquet" in out
    assert "1 (overlong 1)" in out
    assert err == "one CPU worker\n"
    assert cli.execute(["run", "x.parquet", "-q", "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["errors_by_code"] == {"overlong": 1}
    assert err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("u"), 2),
        (ValidationError("v"), 4),
        (BindingError("b"), 4),
        (JobError("j"), 1),
        (OutputLocked("l"), 75),
        (RowError("bad_option", "r"), 1),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: PunicaError, code: int
) -> None:
    failing(monkeypatch, error)
    assert cli.execute(["run", "x.parquet"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"punica-batch: {error}\n")


def test_verbose_adds_the_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, JobError("it failed\nover two lines"))
    assert cli.execute(["run", "x.parquet", "-v"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("punica-batch: it failed over two lines\n")


def test_an_unexpected_error_is_one_short_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, ZeroDivisionError("x" * 5000))
    assert cli.execute(["run", "x.parquet"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("punica-batch: internal error: ZeroDivisionError: xxx")
    assert err.count("\n") == 1
    assert len(err) < 400


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["run"], "no INPUT is given"),
        (["run", "x", "--tempature", "1"], "--temperature"),
        (["run", "x", "--max-tokens", "many"], "--max-tokens"),
        (["run", "x", "--top-p", "3"], "--top-p must be less than or equal to 1"),
        (["run", "x", "--shard", "9/8"], "--shard must be I/N"),
        (["run", "x", "--lora-modules", "a"], "--lora-modules must be NAME=PATH"),
        (["run", "x", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype must be"),
        (["run", "x", "--show", "3", "--json"], "--show prints rows for people, --json one object for programs"),
        (["frobnicate"], "frobnicate"),
        (["status"], "OUTPUT"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    jobs: list[JobConfig], capsys: pytest.CaptureFixture[str], arguments: list[str], needle: str
) -> None:
    assert cli.execute(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert needle in err
    assert jobs == []


def test_wrong_job_file_exits_4(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "punica-batch.toml").write_text("max_tokenz = 3\n")
    assert cli.execute(["run", "x.parquet"]) == 4
    assert capsys.readouterr().err == (
        "punica-batch: punica-batch.toml: unknown key 'max_tokenz'; the nearest valid one is 'max_tokens'\n"
    )


def test_a_closed_pipe_is_no_error(here: Path) -> None:
    """``punica-batch doctor --json | head -0``, and the exit code stays the command's own."""
    code = (
        "import sys, time\n"
        "from punica_batch.ui.console import emit\n"
        "sys.stdin.readline()\n"
        "emit('x' * 1_000_000); emit('y')\n"
        "sys.exit(3)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stderr.read() == ""
    assert child.wait(60) == 3


SLEEPER = """
import sys, time
import punica_batch.job.runner
from punica_batch import cli
def run_job(config, progress=None):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        if "stubborn" in sys.argv:
            print("again", flush=True)
            time.sleep(60)
punica_batch.job.runner.run_job = run_job
sys.exit(cli.execute(["run", "x.parquet", "-q"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_a_job_exits_75_and_a_second_one_at_once(here: Path, number: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75
    assert err == f"punica-batch: stopped by {number.name}; run the same command again to continue\n"

    stubborn = [sys.executable, "-c", SLEEPER, "stubborn"]
    child = subprocess.Popen(stubborn, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    assert child.stdout.readline() == "again\n"
    began = time.monotonic()
    child.send_signal(number)
    child.communicate(timeout=60)
    assert child.returncode == -number
    assert time.monotonic() - began < 30


def test_color_only_on_a_terminal_and_never_with_no_color(here: Path) -> None:
    assert "\x1b" not in process("doctor", "--json").stdout
    forced = process("run", "--help", env={**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "1"}).stdout
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", forced)
