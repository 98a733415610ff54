"""One output and several runs: locks, shards, names and layouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import data_job
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_job import no_fsync, opened, update  # noqa: F401 - the first is a fixture
from output_files import check_output, files_of
from test_data_source import numbered, write

from punica_batch.config import JobConfig
from punica_batch.data.layout import Layout
from punica_batch.data.lock import FileLock
from punica_batch.data.source import Source
from punica_batch.data.state import JobState
from punica_batch.errors import BindingError, InputError, OutputLocked, UsageError

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(params=["out.parquet", "out/"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> JobConfig:
    path = write(numbered(0, 100), tmp_path / "in.parquet", row_group_size=30)
    return JobConfig(inputs=(str(path),), output=f"{tmp_path}/{request.param}", rows_per_shard=30)


@pytest.mark.parametrize("name", ["mine.parquet", "part-1.parquet", "sub/part-00000.parquet", "more.pq"])
def test_a_folder_with_foreign_parquet_files_is_no_output(tmp_path: Path, name: str) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=30)
    data_job.run(config)
    foreign = write(numbered(0, 3), tmp_path / "out" / name)
    (foreign.parent / "loop").symlink_to(foreign.parent)
    for overwrite in (False, True):
        with pytest.raises(BindingError, match=f"out/{name} would be read as part of the output"):
            data_job.run(update(config, overwrite=overwrite))
    foreign.unlink()
    (foreign.parent / "loop").unlink()
    assert data_job.run(update(config, overwrite=True))["finished"]


@pytest.mark.parametrize(
    ("name", "message"), [("c::d.parquet", "chain of stores"), ("/", "whole file system"), ("//", "whole file system")]
)
def test_what_is_no_output_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout.of(JobConfig(inputs=("in.parquet",), output=name))


def test_one_run_at_a_time(config: JobConfig) -> None:
    """Two processes: the second is told, and can go on once the first is gone, however it went."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, config.model_dump_json(exclude_unset=True)],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=Path(__file__).parent, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(OutputLocked, match=f"another run \\(process {holder.pid} on ") as caught:
        data_job.run(config)
    assert caught.value.exit_code == 75
    holder.kill()
    holder.communicate()
    assert data_job.run(config)["finished"]


HOLD = """
import sys, json, data_job
from punica_batch.config import JobConfig
from punica_batch.data.source import Source
from punica_batch.data.state import JobState
config = JobConfig(**json.loads(sys.argv[1]))
state = JobState.open(config, data_job.BINDING, source=Source.open(config))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_file_stays(tmp_path: Path) -> None:
    first = FileLock(tmp_path / "lock")
    inode = (tmp_path / "lock").stat().st_ino
    with pytest.raises(OutputLocked):
        FileLock(tmp_path / "lock")
    first.release()
    FileLock(tmp_path / "lock").release()
    assert (tmp_path / "lock").stat().st_ino == inode


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]])
def test_shards_take_a_slice_each_and_the_last_finishes(config: JobConfig, order: list[int]) -> None:
    whole = update(config, output=config.output.replace("out", "whole"))
    data_job.run(whole)
    ran = 0
    for position, index in enumerate(order):
        shard = update(config, shard=f"{index}/3")
        data_job.run(shard, stop_after=14)
        done = data_job.run(shard)
        ran += done["ran"] + 14
        assert done["finished"] == (position == 2)
    assert ran == 100
    check_output(config)
    assert files_of(config).keys() == {name.replace("whole", "out") for name in files_of(whole)}
    assert list(files_of(config).values()) == list(files_of(whole).values())
    assert data_job.run(update(config, shard="2/3")) == {"ran": 0, "finished": True}
    assert data_job.run(update(config, shard="2/3", overwrite=True))["finished"] is False
    check_output(config)
    for index in (1, 3):
        last = data_job.run(update(config, shard=f"{index}/3", overwrite=True))
    assert last["finished"]
    check_output(config)


def test_shards_run_side_by_side_but_not_beside_a_whole_run(config: JobConfig) -> None:
    with opened(update(config, shard="1/2")), opened(update(config, shard="2/2")) as second:
        assert (second.first_row, second.stop_row) == (60, 100)
        with pytest.raises(OutputLocked):
            opened(update(config, shard="1/2"))
        with pytest.raises(OutputLocked):
            opened(config)


def test_more_shards_than_parts(config: JobConfig) -> None:
    results = [data_job.run(update(config, shard=f"{index}/7")) for index in range(1, 8)]
    assert sum(one["ran"] for one in results) == 100
    assert results[-1]["finished"]
    check_output(config)


def test_nothing_of_the_storage_options_is_written(config: JobConfig, tmp_path: Path) -> None:
    data_job.run(update(config, storage_options={"key": "hush-hush"}))
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hush-hush" not in path.read_bytes()


def test_layouts(tmp_path: Path) -> None:
    def layout(output: str, **values: Any) -> Layout:
        return Layout.of(JobConfig(inputs=("in.parquet",), output=output, **values))

    single = layout(f"{tmp_path}/x.parquet")
    assert (single.target, single.state, single.parts) == ("x.parquet", "x.parquet.punica", "x.parquet.punica/parts/")
    folder = layout(f"{tmp_path}/x/")
    assert (folder.target, folder.state, folder.parts) == (None, "_punica", "")
    assert layout(f"{tmp_path}/x").shown == folder.shown == f"{tmp_path}/x/"
    assert layout(f"{tmp_path}/x.parquet/").target is None
    (tmp_path / "d.parquet").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        layout(f"{tmp_path}/d.parquet")
    remote = layout("memory://b/x.parquet", work_dir=str(tmp_path))
    assert remote.local.parent == tmp_path
    assert remote.shown == "memory://b/x.parquet"


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("begun", ["in.parquet", "link/in.parquet"])
def test_one_file_under_several_names_is_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str) -> None:
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "real" / "link").symlink_to(tmp_path / "real")
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(30)]}), tmp_path / "real" / "in.parquet")
    monkeypatch.chdir(tmp_path / "real")
    data_job.run(JobConfig(inputs=(begun,), rows_per_shard=10), stop_after=14)
    (tmp_path / "deep").symlink_to(tmp_path / "real" / "sub")
    monkeypatch.chdir(tmp_path / "deep")
    names = [
        "../in.parquet",
        str(tmp_path / "real" / "in.parquet"),
        "../link/in.parquet",
        f"{tmp_path}/deep/../in.parquet",
    ]
    left = [data_job.run(JobConfig(inputs=(name,), rows_per_shard=10), stop_after=0)["ran"] for name in names]
    assert left == [0] * 4, "no BindingError"
    with pytest.raises(InputError, match=f"no such file or folder: {tmp_path}/real/no.parquet"):
        Source.open(JobConfig(inputs=("../no.parquet",)))
    assert data_job.run(JobConfig(inputs=(names[0],), rows_per_shard=10)) == {"ran": 16, "finished": True}


def test_who_is_refused_is_told_what_that_command_can_do(config: JobConfig) -> None:
    data_job.run(config)
    changed = update(config, max_tokens=3)
    for is_retry, expected in (
        (False, "Give the old values, another -o, or start over with --overwrite"),
        (True, "A retry needs them as they were: bring them back, or start over with `run --overwrite`"),
    ):
        with pytest.raises(BindingError) as refused:
            JobState.open(changed, data_job.BINDING, source=Source.open(changed), is_retry=is_retry)
        assert str(refused.value).endswith(f". {expected}")
