"""A job without an engine: every row's answer is a function of its number.

``python data_job.py`` serves jobs in processes that tests kill (see ``serve``).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import pytest

from punica_batch.config import JobConfig
from punica_batch.data.crashpoints import VARIABLE
from punica_batch.data.retry import Retry
from punica_batch.data.source import Source
from punica_batch.data.state import JobState
from punica_batch.errors import PunicaError
from punica_batch.types import Completion, FinishReason, RowResult, TokenLogprobs

BINDING = {"model_digest": "m1", "tokenizer_digest": "t1"}


def result(row: int, config: JobConfig, said: str = "answer") -> RowResult:
    """Rows 7, 18, 29… fail."""
    if row % 11 == 7:
        return RowResult(row, None, error=f"null_prompt: row has no prompt ({said}).")
    samples = []
    for sample in range(config.n or 1):
        ids = tuple(range(row % 5 + 1))
        logprobs = None
        if config.logprobs is not None:
            top = tuple(tuple((k, -float(k)) for k in range(config.logprobs)) for _ in ids)
            logprobs = TokenLogprobs(tuple(-0.5 for _ in ids), top)
        reason = FinishReason.LENGTH if row % 3 == 0 else FinishReason.STOP
        samples.append(Completion(ids, f"{said} {row}.{sample} é", reason, logprobs))
    return RowResult(row, row % 7, tuple(samples), adapter_sha256="ab" * 32 if row % 2 else None)


def run(
    config: JobConfig, binding: dict[str, Any] | None = None, *, seed: int = 0, stop_after: int | None = None
) -> dict[str, Any]:
    """Run what is left, in an order shuffled by ``seed``; ``stop_after``: answer so many rows and leave."""
    source = Source.open(config)
    with JobState.open(config, binding or BINDING, source=source) as state:
        if state.is_finished:
            return {"ran": 0, "finished": True}
        state.bind_adapters({"a": "ab" * 32})
        state.commit_ready()
        todo = [row for row in range(state.first_row, state.stop_row) if row not in state.done]
        np.random.default_rng(seed).shuffle(todo)
        ran = 0
        for start in range(0, len(todo), 7):
            chunk = todo[start : start + 7]
            if stop_after is not None and ran + len(chunk) > stop_after:
                return {"ran": ran, "finished": False}
            state.journal.append([result(row, config) for row in chunk])
            state.journal.sync()
            ran += len(chunk)
            state.commit_ready()
        return {"ran": ran, "finished": state.finish() is not None}


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsync is for cannot be seen by a test that pulls no plug; without it tests need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def mended(row: int) -> RowResult:
    sample = Completion((1, 2), f"mended {row}", FinishReason.STOP)
    return RowResult(row, 3, (sample,), adapter_sha256="cd" * 32)


def retry(config: JobConfig, still_bad: tuple[int, ...] = ()) -> list[int]:
    """Mend the error rows, but for ``still_bad``; answers which they were."""
    with JobState.open(config, BINDING, source=Source.open(config), forget_errors=True) as state:
        again = Retry(state)
        rows: list[int] = again.rows.tolist()
        bad = [RowResult(row, None, error="other: still bad.") for row in rows if row in still_bad]
        again.journal.append([*(mended(row) for row in rows if row not in still_bad), *bad])
        again.apply()
        return rows


def serve() -> None:
    """For each line {config, crash_at, seed, retry} on stdin: run it in a fork, print {status, result}."""
    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.fsync = lambda descriptor: None  # what a killed process wrote is there without it
            if order.get("crash_at"):
                os.environ[VARIABLE] = order["crash_at"]
            try:
                config = JobConfig(**order["config"])
                done: Any = retry(config) if order.get("retry") else run(config, seed=order.get("seed", 0))
            except PunicaError as error:
                done = {"error": type(error).__name__, "message": str(error)}
            os.write(writer, json.dumps(done).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, "result": json.loads(said or b"null")}), flush=True)


def update(config: JobConfig, **values: Any) -> JobConfig:
    return config.model_copy(update=values)


def opened(config: JobConfig, binding: dict[str, Any] | None = None) -> JobState:
    return JobState.open(config, binding or BINDING, source=Source.open(config))


if __name__ == "__main__":
    serve()
