"""Killed at every point of the commit protocol, again and again, a job ends with the uninterrupted run's output."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_tools import Job, assert_carried, durable_rows, make_rows

from punica_batch.data.crashpoints import CRASHPOINTS, VARIABLE

ROWS, PART = 60, 9
KILLED = -9
OVERWRITE = tuple(p for p in CRASHPOINTS if p.startswith("overwrite."))
FOLDER_STEPS = ("move.before", "move.after", "remove.before", "remove.after")
SINGLE = tuple(p for p in CRASHPOINTS if p not in OVERWRITE)
DATASET = tuple(p for p in SINGLE if not p.startswith("assemble."))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crash")
    pq.write_table(make_rows(ROWS), folder / "rows.parquet")
    return folder


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    # Batches of 4 rows and 7 parts: parts become ready while the run goes on.
    options = ("--rows-per-shard", str(PART), "--max-num-seqs", "4")
    return Job(folder, "out.parquet", options=options, env={"JOB_TEST_ENGINE": "fake", "JOB_TEST_STEP": "0.01"})


@pytest.fixture(scope="module")
def uninterrupted(job: Job) -> pa.Table:
    whole = replace(job, output="whole.parquet")
    ended = whole.run_quick()
    assert ended.code == 0, ended.stderr
    assert sorted(row for row, _ in ended.rows) == list(range(ROWS))
    assert_carried(whole.table(), pq.read_table(job.folder / "rows.parquet"))
    assert whole.table()["error"].null_count == ROWS
    return whole.table()


class Chain:
    """Runs of one job, killed at one point after another; what was durable at a kill must never run again."""

    def __init__(self, job: Job, uninterrupted: pa.Table, *options: str) -> None:
        self._job, self._uninterrupted, self._options = job, uninterrupted, options
        self.reached: set[str] = set()
        self._durable: set[int] = set()

    def run(self, crash: str = "") -> bool:
        """One run, to be killed at ``crash`` ("point:count"). False when it reached its end before that."""
        ended = self._job.run_quick(*self._options, env={VARIABLE: crash} if crash else None)
        again = {row for row, _ in ended.rows} & self._durable
        assert not again, f"{crash}: rows {again} were durable and ran again"
        if ended.code == KILLED:
            self.reached.add(crash.partition(":")[0])
            self._durable = durable_rows(self._job.out, is_folder=self._job.output.endswith("/"))
            if crash.startswith("overwrite.switch.after"):  # nothing was left to do: --overwrite starts over
                self._durable = set()
            return True
        assert ended.code == 0, f"{crash}: {ended.stderr}"
        assert self._job.table().equals(self._uninterrupted), crash
        self._durable = set()
        return False

    def run_through(self, points: Sequence[str], counts: tuple[int, ...], rng: random.Random) -> None:
        """Killed at each of ``points`` in turn; a finished output is taken away and made anew."""
        for point in points:
            if self.run(f"{point}:{rng.choice(counts)}"):
                continue
            self.clear()
            if point.startswith("journal.discard."):  # passed when all rows of an older run's journal are in parts
                self.clear()
                assert self.run("journal.write.after:3")
                assert self.run(f"{point}:1")
            else:
                if not self.run(f"{point}:{rng.choice(counts)}"):
                    self.clear()
                    assert self.run(f"{point}:1"), f"{point} is never reached"
        while self.run(""):
            pass

    def clear(self) -> None:
        for path in self._job.folder.glob(f"{self._job.output.rstrip('/')}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def in_order(points: Sequence[str], rng: random.Random) -> list[str]:
    """By the stage of the run that passes them, shuffled in each: so a chain goes on with what the last run left."""
    stages = ["plan", "adapters journal part commit", "assemble success overwrite"]
    return [
        point
        for stage in stages
        for point in rng.sample(points, len(points))
        if point.partition(".")[0] in stage.split()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "points", "counts", "seed"),
    [("out.parquet", SINGLE, (1, 2, 3), 1), ("out/", DATASET, (1, 2), 2)],
)
def test_killed_at_every_point(
    job: Job, uninterrupted: pa.Table, output: str, points: tuple[str, ...], counts: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(seed)
    chain = Chain(replace(job, output=output), uninterrupted)
    chain.run_through(in_order(points, rng), counts, rng)
    assert chain.reached == set(points)


@pytest.mark.slow
@pytest.mark.parametrize(("output", "seed"), [("new.parquet", 4), ("new/", 5)])
def test_overwrite_killed_at_every_point(job: Job, uninterrupted: pa.Table, output: str, seed: int) -> None:
    """The old output is whole until the new one is complete, and the new one is never begun again."""
    rng = random.Random(seed)
    old = replace(job, output=output, options=("--rows-per-shard", "4", "--max-tokens", "7"))
    new = replace(job, output=output, options=(*job.options, "--overwrite"))
    steps = [p for p in OVERWRITE if output == "new/" or p.partition(".")[2] not in FOLDER_STEPS]
    before = ["plan.write.after", "journal.write.after", "part.rename.before", "commit.write.middle"]
    points = before + rng.sample(steps, len(steps)) + ["success.write.before", "success.write.after"]
    chain = Chain(new, uninterrupted)
    assert old.run_quick().code == 0
    old_table, kept = old.table(), job.folder / "kept"
    kept.mkdir()
    for path in job.folder.glob("new*"):
        path.rename(kept / path.name)
    for point in points:
        chain.clear()
        shutil.copytree(kept, job.folder, dirs_exist_ok=True)
        assert chain.run(f"{point}:1"), point
        if point in before or point == "overwrite.switch.before":
            assert old.table().equals(old_table), point
        for _ in range(rng.randrange(2)):
            chain.run(rng.choice(points) + ":1")
        assert not chain.run()
    assert chain.reached == set(points)
    shutil.rmtree(kept)
