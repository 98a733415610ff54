from __future__ import annotations

from pathlib import Path
from typing import Any

import data_job
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_job import mended, no_fsync, opened, retry, update  # noqa: F401 - a fixture
from output_files import files_of
from test_data_crash import KILLED, Server
from test_data_source import every_type, numbered, write

from punica_batch.config import JobConfig
from punica_batch.data.finish import read_success
from punica_batch.data.retry import Retry
from punica_batch.data.source import Source
from punica_batch.data.state import JobState
from punica_batch.errors import JobError

FAILED = [row for row in range(100) if row % 11 == 7]


pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
@pytest.mark.parametrize("prefix", ["", "llm_"])
def test_error_rows_are_replaced_and_nothing_else(tmp_path: Path, output: str, prefix: str) -> None:
    path = write(every_type(100), tmp_path / "in.parquet", row_group_size=30)
    config = JobConfig(
        inputs=(str(path),), output=f"{tmp_path}/{output}", rows_per_shard=30, output_prefix=prefix
    )  # fmt: skip
    data_job.run(config)
    before = pq.read_table(config.output)
    assert retry(config, still_bad=(18,)) == FAILED
    after = pq.read_table(config.output)
    assert after.schema.equals(before.schema, check_metadata=True)
    kept = pa.array([row not in FAILED for row in range(100)])
    assert after.filter(kept).equals(before.filter(kept))
    carried = [name for name in before.schema.names if not name.startswith(f"{prefix}g")][:23]
    assert after.select(carried).equals(before.select(carried))
    texts = [after[f"{prefix}generation"][row].as_py() for row in FAILED]
    assert texts == [f"mended {row}" if row != 18 else None for row in FAILED]
    assert after[f"{prefix}error"][18].as_py() == "other: still bad."
    assert after[f"{prefix}adapter_sha256"][7].as_py() == "cd" * 32
    with opened(config) as state:
        assert state.is_finished
        assert state.success == read_success(state.base)
        assert state.success is not None
        assert (state.success.rows, state.success.errors) == (100, {"other": 1})
        assert state.success.finish_reasons["error"] == 1
        assert sum(state.success.finish_reasons.values()) == 100
        assert state.success.completion_tokens == sum(after[f"{prefix}completion_tokens"].drop_null().to_pylist())
        assert not (state.layout.local / "retry").exists()
    assert retry(config) == [18]
    assert retry(config) == []
    assert pq.read_table(config.output)[f"{prefix}error"].null_count == 100


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_a_retried_output_is_as_if_the_rows_had_never_failed(tmp_path: Path, output: str) -> None:
    """Byte for byte, though a part is rewritten from itself."""
    path = write(numbered(0, 100), tmp_path / "in.parquet", row_group_size=30)
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/{output}", rows_per_shard=30)
    data_job.run(config)
    retry(config)
    good = update(config, output=config.output.replace("out", "good"))
    with opened(good) as state:
        answers = [mended(row) if row in FAILED else data_job.result(row, config) for row in range(100)]
        state.journal.append(answers)
        state.commit_ready()
        state.finish()
    assert list(files_of(config).values()) == list(files_of(good).values())


def test_an_interrupted_retry_goes_on(tmp_path: Path) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=30)
    data_job.run(config)
    with opened(config) as state:
        again = Retry(state)
        again.journal.append([mended(row) for row in (7, 18, 95)])
        again.journal.sync()
    with opened(config) as state:
        again = Retry(state)
        assert again.error_rows.tolist() == FAILED
        assert again.rows.tolist() == [row for row in FAILED if row not in (7, 18, 95)]
        again.apply()
    with opened(config) as state:
        assert Retry(state).rows.tolist() == [row for row in FAILED if row not in (7, 18, 95)]
        state.bind_adapter("a", "ff" * 32, rebind=True)


def test_retry_of_an_unfinished_output(tmp_path: Path) -> None:
    """Committed parts are mended in place; error rows that are only journalled run again with the rest."""
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out.parquet", rows_per_shard=30)
    with opened(config) as state:
        state.journal.append([data_job.result(row, config) for row in range(70)])
        assert len(state.commit_ready()) == 2
    with JobState.open(config, data_job.BINDING, source=Source.open(config), forget_errors=True) as state:
        again = Retry(state)
        assert again.rows.tolist() == [7, 18, 29, 40, 51]
        again.journal.append([mended(row) for row in again.rows.tolist()])
        again.apply()
        assert [row for row in range(60, 70) if row not in state.done] == [62]
        assert state.error_rows == 0
        state.journal.append([mended(62)])
        state.journal.append([data_job.result(row, config) for row in range(70, 100)])
        state.commit_ready()
        state.finish()
    got = pq.read_table(config.output)
    assert got["k"].to_pylist() == list(range(100))
    assert [row for row in range(100) if got["error"][row].as_py() is not None] == [73, 84, 95]


def test_retry_of_shards_is_of_the_whole_output(tmp_path: Path) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=30)
    for index in (1, 2):
        data_job.run(update(config, shard=f"{index}/2"))
    assert retry(update(config, shard="1/2")) == FAILED
    with opened(update(config, shard="2/2")) as state:
        assert state.success is not None
        assert state.success.error_rows == 0


def test_retry_of_a_remote_output(tmp_path: Path) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    store = fsspec.filesystem("memory")
    for output in ("out.parquet", "out/"):
        url = f"memory://{tmp_path.name}/{output}"
        config = JobConfig(inputs=(str(path),), output=url, rows_per_shard=30, work_dir=str(tmp_path / "work"))
        data_job.run(config)
        assert retry(config) == FAILED
        assert retry(config) == []
        names = store.glob(f"/{tmp_path.name}/{output if output.endswith('t') else 'out/part-*.parquet'}")
        table = pa.concat_tables([pq.read_table(store.open(name)) for name in sorted(names)])
        assert table["error"].null_count == 100
        assert table["k"].to_pylist() == list(range(100))
    store.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture(scope="module")
def server() -> Any:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
@pytest.mark.parametrize(
    "point",
    ["journal.write.middle:1", "part.write.middle:1", "part.fsync.before:1", "part.rename.before:1",
     "part.rename.after:1", "commit.write.before:1", "commit.write.middle:2", "commit.fsync.after:1",
     "success.write.before:1", "success.write.after:1"],
)  # fmt: skip
def test_a_killed_retry_does_no_harm(server: Server, tmp_path: Path, output: str, point: str) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/{output}", rows_per_shard=30)
    data_job.run(config)
    assert server.run(config, point, retry=True)["status"] == KILLED
    got = pq.read_table(config.output)
    assert got["k"].to_pylist() == list(range(100))  # readers see whole parts throughout
    assert server.run(config, retry=True)["status"] == 0
    got = pq.read_table(config.output)
    assert got["k"].to_pylist() == list(range(100))
    assert got["error"].null_count == 100
    assert np.array(got["generation"].to_pylist())[FAILED].tolist() == [f"mended {row}" for row in FAILED]
    with opened(config) as state:
        assert state.success is not None
        assert (state.success.rows, state.success.error_rows) == (100, 0)


def test_a_retry_beside_a_changed_input_replaces_nothing(tmp_path: Path) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out.parquet", rows_per_shard=30)
    data_job.run(config)
    before = (tmp_path / "out.parquet").read_bytes()
    with JobState.open(config, data_job.BINDING, source=Source.open(config), forget_errors=True) as state:
        again = Retry(state)
        again.journal.append([data_job.mended(row) for row in again.rows.tolist()])
        write(numbered(100, 200), path)
        with pytest.raises(JobError, match="changed while the job ran"):
            again.apply()
    assert (tmp_path / "out.parquet").read_bytes() == before


def test_a_retry_that_raises_runs_the_row_that_stopped_it_anew(tmp_path: Path) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=30, on_error="raise")
    data_job.run(config)
    with opened(config) as state:
        again = Retry(state)
        again.journal.append([mended(7), data_job.result(18, config)])
        again.journal.sync()
    with opened(update(config, on_error="record")) as state:
        assert Retry(state).rows.tolist() == FAILED[2:]
    with opened(config) as state:
        assert Retry(state).rows.tolist() == FAILED[1:]
