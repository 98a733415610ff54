"""Runs the product as its users do, in processes of its own, over small jobs made of the shipped sample.

The engine of a run's workers may be replaced or sabotaged, see ``worker_hook/sitecustomize``; all else is the product.
"""

from __future__ import annotations

import datetime
import decimal
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

SAMPLE = Path(__file__).parents[2] / "sample_data"
HOOK = Path(__file__).parent / "worker_hook"
MODEL, ADAPTERS = SAMPLE / "model", SAMPLE / "adapters.toml"
NAMES = ("sentiment", "topic", "urgency", "language", "order-number")
RESULTS = ("generation", "finish_reason", "prompt_tokens", "completion_tokens", "error", "adapter_sha256")
PRELOAD = ["punica_batch.cli", "punica_batch.job.runner", "punica_batch.job.retry", "punica_batch.ui.progress"]
TIMEOUT = 120.0


def make_rows(count: int, *, seed: int = 0, names: Sequence[str | None] = (*NAMES, None, "")) -> pa.Table:
    """Short prompts of the sample, adapters at random, and carried columns of many types."""
    rng = random.Random(seed)
    prompts = pq.read_table(SAMPLE / "requests.parquet")["prompt"].to_pylist()
    start = datetime.datetime(2024, 3, 1, tzinfo=datetime.UTC)
    columns: dict[str, pa.Array] = {
        "id": pa.array([f"row-{i}" for i in range(count)]),
        "prompt": pa.array([f"{rng.choice(prompts)[:40]} {i}" for i in range(count)]),
        "lora_id": pa.array([rng.choice(names) for _ in range(count)], pa.string()).dictionary_encode(),
        "number": pa.array([None if i % 7 == 3 else i * i for i in range(count)], pa.int64()),
        "amount": pa.array([decimal.Decimal(i) / 4 for i in range(count)], pa.decimal128(12, 2)),
        "at": pa.array([start + datetime.timedelta(hours=i) for i in range(count)], pa.timestamp("ms", "Europe/Paris")),
        "tags": pa.array([[f"t{j}" for j in range(i % 3)] or None for i in range(count)], pa.list_(pa.string())),
    }
    return pa.table(columns)


@dataclass(frozen=True)
class Ended:
    """How a run ended. ``code``: negative for a signal. ``rows``: (row, time) of each row that its workers finished."""

    code: int
    stdout: str
    stderr: str
    rows: list[tuple[int, float]]
    at: float

    @property
    def last_line(self) -> str:
        return self.stderr.strip().split("\n")[-1]


@dataclass
class Job:
    """One command line. ``env``: what the worker hook reads, and whatever else the run's environment needs."""

    folder: Path
    output: str
    inputs: tuple[str, ...] = ("rows.parquet",)
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    model: Path = MODEL
    adapters: Path = ADAPTERS
    command: str = "run"

    @property
    def out(self) -> Path:
        return self.folder / self.output

    def arguments(self, *extra: str) -> list[str]:
        target = [str(self.out) + "/" * self.output.endswith("/")]
        job = ["--model", str(self.model), "--adapters", str(self.adapters), "--device", "cpu"]
        if self.command == "retry":
            return ["retry", *target, *job[4:], *extra]
        inputs = [name if "://" in name else str(self.folder / name) for name in self.inputs]
        return [self.command, *inputs, "-o", *target, *job, *self.options, *extra]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PUNICA_BATCH_", "JOB_TEST_"))}
        return env | {
            "PYTHONPATH": str(HOOK),
            "PUNICA_BATCH_CACHE": str(self.folder / "cache"),
            "JOB_TEST_LOG": str(self.folder / "log"),
            "NO_COLOR": "1",
            **self.env,
            **(extra or {}),
        }

    def start(self, *extra: str, env: Mapping[str, str] | None = None) -> Running:
        (self.folder / "log").unlink(missing_ok=True)
        return Running(self, [*self.arguments(*extra)], self.environment(env))

    def run(self, *extra: str, env: Mapping[str, str] | None = None) -> Ended:
        """To its end, in a fresh interpreter."""
        with self.start(*extra, env=env) as running:
            return running.wait()

    def run_quick(self, *extra: str, env: Mapping[str, str] | None = None) -> Ended:
        """As ``run``, in a process forked from one that has imported the parent's modules already."""
        (self.folder / "log").unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        out, err = self.folder / "stdout", self.folder / "stderr"
        arguments, environment = self.arguments(*extra), self.environment(env)
        process = context.Process(target=_execute, args=(arguments, environment, str(out), str(err)))
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"still running after {TIMEOUT} s: {err.read_text()}")
        return Ended(process.exitcode, out.read_text(), err.read_text(), self.log(), time.time())

    def log(self) -> list[tuple[int, float]]:
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(row), float(at)) for row, at, _ in map(str.split, lines)]

    def rows_by_worker(self) -> Counter[str]:
        """How many rows each worker process finished in the last run."""
        return Counter(line.split()[2] for line in (self.folder / "log").read_text().splitlines())

    def table(self) -> pa.Table:
        """The output, as pyarrow reads it."""
        return pq.read_table(self.out)


def _execute(arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    for descriptor, path in ((1, out), (2, err)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, descriptor)
        os.close(target)
    os.environ.clear()
    os.environ.update(environment)
    from punica_batch.cli import execute

    sys.exit(execute(arguments))


class Running:
    """A run that can be watched and killed; ended, with its workers, when the context is left."""

    def __init__(self, job: Job, arguments: list[str], environment: dict[str, str]) -> None:
        self.job = job
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this object
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "punica_batch", *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, cwd=job.folder,
        )  # fmt: skip
        self._children: dict[int, psutil.Process] = {}

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.children("")
        self.process.kill()
        self.process.wait()
        for child in self._children.values():
            with_gone(child.kill)
        self._out.close()
        self._err.close()

    def children(self, module: str = "workers.worker") -> list[psutil.Process]:
        """The child processes that run ``module`` now ("": all)."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._children |= {child.pid: child for child in found}
        return [c for c in found if any(module in part for part in with_gone(c.cmdline) or [""])]

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Waits for ``condition`` while the run goes on."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            assert self.process.poll() is None, f"the run has ended: {self.stderr()}"
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s: {self.stderr()}")

    def until_finished(self, rows: int) -> None:
        """Waits until workers have finished so many rows."""
        self.until(lambda: len(self.job.log()) >= rows)

    def stderr(self) -> str:
        self._err.seek(0)
        return self._err.read()

    def wait(self, timeout: float = TIMEOUT) -> Ended:
        code = self.process.wait(timeout)
        self._out.seek(0)
        return Ended(code, self._out.read(), self.stderr(), self.job.log(), time.time())


def with_gone(call: Callable[[], Any]) -> Any:
    """``call()``, None when its process is gone."""
    try:
        return call()
    except psutil.NoSuchProcess:
        return None


def is_alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and with_gone(process.status) not in (None, psutil.STATUS_ZOMBIE))


def durable_rows(output: Path, *, is_folder: bool) -> set[int]:
    """The rows that a resume of ``output`` need not run again, read from a copy of its state."""
    from punica_batch.config import JobConfig
    from punica_batch.data.commits import open_commits
    from punica_batch.data.journal import Journal
    from punica_batch.data.layout import Layout
    from punica_batch.data.schema import result_schema

    with tempfile.TemporaryDirectory() as copy:
        target = Path(copy) / output.name
        state = output / "_punica" if is_folder else output.with_name(output.name + ".punica")
        if not state.exists():
            return set()
        shutil.copytree(state, target / "_punica" if is_folder else target.with_name(target.name + ".punica"))
        layout = Layout.of_output(str(target) + "/" * is_folder, JobConfig())
        if layout.store.read(layout.next_generation().in_state("plan.json")) is not None:
            layout = layout.next_generation()
        rows = {r for info in open_commits(layout).load() for r in range(info.first_row, info.first_row + info.rows)}
        if layout.journal.exists():
            journal = Journal(layout.journal, result_schema(JobConfig(), lists=False))
            rows |= set(journal.recover())
        return rows


def assert_carried(output: pa.Table, rows: pa.Table) -> None:
    """Same rows, each once, in order, with every input column as it was."""
    assert output.num_rows == rows.num_rows
    for name in rows.column_names:
        assert output.schema.field(name).equals(rows.schema.field(name), check_metadata=True), name
        assert output[name].to_pylist() == rows[name].to_pylist(), name
