"""Kill the data layer at every point that its protocol names, then run the job again: same bytes, each row once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_job
import numpy as np
import pyarrow.parquet as pq
import pytest
from test_data_source import numbered, write

from punica_batch.config import JobConfig
from punica_batch.data.crashpoints import CRASHPOINTS
from punica_batch.data.source import Source
from punica_batch.data.state import JobState

ROWS = 60
KILLED = -9
# Points that a run without --overwrite, or one of a folder of parts, never passes.
OVERWRITE = {name for name in CRASHPOINTS if name.startswith("overwrite.")}
SINGLE = {name for name in CRASHPOINTS if name.startswith("assemble.")}


class Server:
    """``data_job.serve`` in a process of its own: a fork for each job, which starts at once and can be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("data_job.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, config: JobConfig, crash_at: str | None = None, seed: int = 0, retry: bool = False) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"config": config.model_dump(exclude_unset=True), "crash_at": crash_at, "seed": seed, "retry": retry}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def files_of(config: JobConfig) -> list[bytes]:
    path = Path(config.output or "")
    return [p.read_bytes() for p in ([path] if path.is_file() else sorted(path.glob("part-*.parquet")))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(numbered(0, ROWS), tmp_path_factory.mktemp("in") / "in.parquet", row_group_size=25)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """What uninterrupted runs write."""
    folder = tmp_path_factory.mktemp("expected")
    found = {}
    for output in ("out.parquet", "out/"):
        config = JobConfig(inputs=(str(source),), output=f"{folder}/{output}", rows_per_shard=25)
        data_job.run(config)
        found[output] = files_of(config)
    return found


def check(config: JobConfig, expected: list[bytes]) -> None:
    assert files_of(config) == expected
    got = pq.read_table(config.output)
    assert got["k"].to_pylist() == list(range(ROWS))
    with JobState.open(config, data_job.BINDING, source=Source.open(config)) as state:
        assert state.is_finished
        assert state.success is not None
        assert state.success.rows == ROWS
        names = {path.name for path in (state.base.store.root / state.base.state).iterdir()}  # type: ignore[attr-defined]
        assert names <= {"lock", "lock-all", "plan.json", "commits", "adapters", "_SUCCESS"}


CASES = [
    (name, output)
    for name in CRASHPOINTS
    for output in ("out.parquet", "out/")
    if name in OVERWRITE or (output == "out.parquet") == (name in SINGLE)
]


@pytest.mark.parametrize(("name", "output"), CASES)
def test_killed_at_each_point(
    server: Server, source: Path, expected: dict[str, list[bytes]], tmp_path: Path, name: str, output: str
) -> None:
    config = JobConfig(inputs=(str(source),), output=f"{tmp_path}/{output}", rows_per_shard=25)
    first = config
    if name in OVERWRITE:
        old = config.model_copy(update={"rows_per_shard": 10, "temperature": 1.0})
        data_job.run(JobConfig(**old.model_dump(exclude_unset=True)))
        first = JobConfig(**config.model_dump(exclude_unset=True), overwrite=True)
    seen = 0
    for count in (1, 2):  # the second kill hits the resume
        died = server.run(first, f"{name}:{count}", seed=count)
        seen += died["status"] == KILLED
    if not seen:
        assert output == "out.parquet"
        assert name.startswith(("overwrite.move", "overwrite.remove"))
    done = server.run(config if name in OVERWRITE and first_is_over(first) else first, seed=9)
    assert done["status"] == 0
    assert done["result"].get("finished"), done
    check(config, expected[output])


def first_is_over(config: JobConfig) -> bool:
    """Whether an overwrite has passed its switch, so that asking for it again would begin another one."""
    path = Path(config.output or "")
    state = path / "_punica" if path.is_dir() else path.with_name(path.name + ".punica")
    return not (state / "next" / "plan.json").exists()


@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again_repeats_little(
    server: Server, source: Path, expected: dict[str, list[bytes]], tmp_path: Path, seed: int
) -> None:
    """Seeded kills, one after the other. A row is run again only if its batch of at most 7 was not yet synced."""
    random = np.random.default_rng(seed)
    output = ["out.parquet", "out/"][seed % 2]
    config = JobConfig(inputs=(str(source),), output=f"{tmp_path}/{output}", rows_per_shard=25)
    names = [name for name in CRASHPOINTS if name.startswith(("journal.", "part.", "commit."))]
    counts: list[int] = []
    for attempt in range(6):
        name = names[random.integers(len(names))]
        answer = server.run(config, f"{name}:{random.integers(1, 5)}", seed=attempt)
        if answer["status"] == KILLED:
            with JobState.open(config, data_job.BINDING, source=Source.open(config)) as state:
                counts.append(state.done.count(0, ROWS))
        else:
            break
    last = server.run(config, seed=99)
    assert last["result"]["finished"]
    assert counts == sorted(counts)  # what was done stays done
    assert counts
    check(config, expected[output])
