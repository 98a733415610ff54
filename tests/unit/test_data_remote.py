"""Outputs on remote stores: resume, shards, and the lease that keeps two runs apart."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import data_job
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_job import no_fsync, opened, update  # noqa: F401 - the first is a fixture
from test_data_source import numbered, write

from punica_batch.config import JobConfig
from punica_batch.data import lock as lock_module
from punica_batch.data import store as store_module
from punica_batch.data.lock import Lease
from punica_batch.data.store import RemoteStore
from punica_batch.errors import BindingError, OutputLocked, StoreAway, UsageError

pytestmark = pytest.mark.usefixtures("no_fsync")


def forget(store: Any, tmp_path: Path) -> None:
    if store.exists(f"/{tmp_path.name}"):
        store.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture(params=["out.parquet", "out/"])
def remote(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    store = fsspec.filesystem("memory")
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    url = f"memory://{tmp_path.name}/{request.param}"
    yield JobConfig(inputs=(str(path),), output=url, rows_per_shard=30, work_dir=str(tmp_path / "work"))
    forget(store, tmp_path)


def remote_rows(config: JobConfig) -> pa.Table:
    store = fsspec.filesystem("memory")
    path = config.output.removeprefix("memory:/")
    names = [path] if path.endswith(".parquet") else store.glob(f"{path}part-*.parquet")
    return pa.concat_tables([pq.read_table(store.open(name)) for name in sorted(names)])


def test_remote_output_needs_a_work_dir(remote: JobConfig) -> None:
    with pytest.raises(UsageError, match="--work-dir"):
        data_job.run(update(remote, work_dir=None))


def test_remote_resume_and_overwrite(remote: JobConfig) -> None:
    assert data_job.run(remote, stop_after=70) == {"ran": 70, "finished": False}
    assert data_job.run(remote)["ran"] == 30
    assert remote_rows(remote)["k"].to_pylist() == list(range(100))
    assert data_job.run(remote) == {"ran": 0, "finished": True}
    names = fsspec.filesystem("memory").find(remote.output.removeprefix("memory:/").rpartition("/")[0])
    assert not [name for name in names if "journal" in name or "staging" in name or "tmp" in name]
    with pytest.raises(BindingError, match="temperature"):
        data_job.run(update(remote, temperature=0.5))
    new = update(remote, temperature=0.5, overwrite=True, rows_per_shard=50)
    data_job.run(new, stop_after=70)
    assert remote_rows(remote).num_rows == 100
    assert data_job.run(new)["finished"]
    assert remote_rows(remote)["k"].to_pylist() == list(range(100))
    assert data_job.run(update(new, overwrite=False)) == {"ran": 0, "finished": True}


def test_remote_parts_survive_a_lost_work_dir(remote: JobConfig, tmp_path: Path) -> None:
    """Only what was journalled is lost with it; adapters stay bound."""
    with opened(remote) as state:
        state.bind_adapter("a", "1" * 64)
        state.journal.append([data_job.result(row, remote) for row in range(40)])
        assert len(state.commit_ready()) == 1
    other = update(remote, work_dir=str(tmp_path / "elsewhere"))
    with opened(other) as state:
        assert (state.committed, state.next_row, len(state.done)) == (1, 30, 30)
        with pytest.raises(BindingError, match="adapter 'a'"):
            state.bind_adapter("a", "2" * 64)


def test_remote_shards(remote: JobConfig, tmp_path: Path) -> None:
    done = [
        data_job.run(update(remote, shard=f"{index}/2", work_dir=str(tmp_path / f"work{index}")))["finished"]
        for index in (2, 1)
    ]
    assert done == [False, True]
    assert remote_rows(remote)["k"].to_pylist() == list(range(100))


@pytest.fixture
def memory_store(tmp_path: Path) -> Any:
    store = fsspec.filesystem("memory")
    yield RemoteStore(store, f"/{tmp_path.name}")
    forget(store, tmp_path)


def test_a_lease_is_exclusive_until_released_or_stale(
    memory_store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Lease(memory_store, "lease")
    with pytest.raises(OutputLocked, match="another run"):
        Lease(memory_store, "lease")
    first.check()
    first.release()
    second = Lease(memory_store, "lease", heartbeat=0.01)
    assert second.epoch == first.epoch + 1
    held = memory_store.read(f"lease/{second.epoch:08d}")
    deadline = time.monotonic() + 5
    while memory_store.read(f"lease/{second.epoch:08d}") == held:  # the heart beats
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second._stop.set()  # the process hangs
    second._thread.join()
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 0.0)
    third = Lease(memory_store, "lease")
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 60.0)
    with pytest.raises(OutputLocked, match="taken over"):
        second.check()
    third.check()
    third.release()


def test_of_many_at_once_one_gets_the_lease(memory_store: RemoteStore) -> None:
    got: list[Lease] = []
    start = threading.Barrier(4)

    def take() -> None:
        start.wait()
        with suppress(OutputLocked):
            got.append(Lease(memory_store, "lease"))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()


class NoExclusiveCreate:
    """A store that overwrites whatever it is told."""

    protocol = "lax"

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self._inner.pipe_file(path, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class OldStore(NoExclusiveCreate):
    """A store that knows no mode."""

    def pipe_file(self, path: str, data: bytes) -> None:  # type: ignore[override]
        self._inner.pipe_file(path, data)


@pytest.mark.parametrize("kind", [NoExclusiveCreate, OldStore])
def test_a_store_without_exclusive_create_is_refused(tmp_path: Path, kind: Any) -> None:
    store = RemoteStore(kind(fsspec.filesystem("memory")), f"/{tmp_path.name}")
    with pytest.raises(UsageError, match="cannot create a file exclusively"):
        Lease(store, "lease")


class Flaky(NoExclusiveCreate):
    """Fails so many times, then answers."""

    failures = 0

    def cat_file(self, path: str) -> bytes:
        if self.failures:
            self.failures -= 1
            raise OSError("reset by peer")
        return bytes(self._inner.cat_file(path))


def test_a_store_that_is_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(store_module.time, "sleep", pauses.append)
    flaky = Flaky(fsspec.filesystem("memory"))
    store = RemoteStore(flaky, f"/{tmp_path.name}")
    store.write("x", b"1")
    flaky.failures = 3
    assert store.read("x") == b"1"
    assert pauses == [0.5, 1.0, 2.0]
    flaky.failures = 100
    with pytest.raises(StoreAway, match="does not answer"):
        store.read("x")
    flaky.failures = 0
    assert store.read("none") is None
    store.remove("x")
