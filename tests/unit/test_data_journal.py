from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import data_job
import numpy as np
import pytest
from data_job import no_fsync  # noqa: F401 - a fixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punica_batch.config import JobConfig
from punica_batch.data import journal as journal_module
from punica_batch.data import segment as segment_module
from punica_batch.data.journal import Journal
from punica_batch.data.schema import result_schema, results_to_batch
from punica_batch.errors import DiskFull, JobError
from punica_batch.types import RowResult

pytestmark = pytest.mark.usefixtures("no_fsync")

CONFIG = JobConfig(logprobs=2)
SCHEMA = result_schema(CONFIG, lists=False)


def results(rows: Any, said: str = "answer") -> list[RowResult]:
    return [data_job.result(int(row), CONFIG, said) for row in rows]


def as_dicts(rows: Any, said: str = "answer") -> list[dict[str, Any]]:
    return results_to_batch(results(rows, said), SCHEMA).to_pylist()


def test_rows_come_back_in_order_and_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", SCHEMA)
    order = np.random.default_rng(0).permutation(3000)
    for chunk in np.array_split(order, 40):
        journal.append(results(chunk))
        journal.maybe_sync()
    assert journal.rows(0, 3000).to_pylist() == as_dicts(range(3000))
    assert journal.rows(1234, 1300).to_pylist() == as_dicts(range(1234, 1300))
    pieces = list(journal.iter_rows(100, 1100, max_bytes=20_000))
    assert len(pieces) > 3
    assert [row for piece in pieces for row in piece.to_pylist()] == as_dicts(range(100, 1100))
    assert list(journal.failed) == [row for row in range(3000) if row % 11 == 7]
    journal.close()
    again = Journal(tmp_path / "j", SCHEMA)
    assert len(again.recover()) == 3000
    assert again.rows(0, 3000).to_pylist() == as_dicts(range(3000))
    assert list(again.failed) == list(journal.failed)


def test_a_missing_row_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", SCHEMA)
    journal.append(results([1, 2, 4]))
    with pytest.raises(JobError, match="row 3 is not in the journal"):
        journal.rows(1, 5)


def test_duplicates_first_wins_but_success_replaces_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", SCHEMA)
    journal.append(results([1, 7, 18]))
    journal.append(results([1], "late"))
    journal.close()
    other = Journal(tmp_path / "j", SCHEMA)
    other.recover(forget_errors=True)
    assert list(other.present) == [1]
    good = data_job.result(1, CONFIG, "retried")
    other.append([RowResult(7, 1, good.completions), RowResult(18, None, error="other: still wrong.")])
    other.close()
    again = Journal(tmp_path / "j", SCHEMA)
    assert list(again.recover()) == [1, 7, 18]
    assert again.rows(1, 2)["generation"].to_pylist() == ["answer 1.0 é"]
    assert again.rows(7, 8)["generation"].to_pylist() == ["retried 1.0 é"]
    assert again.rows(18, 19)["error"].to_pylist() == ["null_prompt: row has no prompt (answer)."]
    assert list(again.failed) == [18]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_recovers_what_is_whole_after_any_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A row is there exactly when its frame's bytes are untouched; what is appended afterwards is kept too."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, SCHEMA)
    frames: list[tuple[int, int, list[int]]] = []
    row = 0
    for count in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6)):
        rows = list(range(row, row + count))
        before = journal._writer.size if journal._writer else 0
        journal.append(results(rows))
        journal.sync()
        assert journal._writer is not None
        frames.append((before, journal._writer.size, rows))
        row += count
    journal.close()
    path = folder / "00000000.seg"
    content = bytearray(path.read_bytes())
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    flips = data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3, unique=True))
    for position in flips:
        content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content[:cut])
    damaged = {
        number
        for number, (start, stop, _) in enumerate(frames)
        if (cut is not None and cut < stop) or any(start <= position < stop for position in flips)
    }
    whole = [r for number, (_, _, rows) in enumerate(frames) if number not in damaged for r in rows]
    again = Journal(folder, SCHEMA)
    found = list(again.recover())
    # A flip in a header's or a payload's padding harms nothing.
    assert set(whole) <= set(found) <= set(range(row))
    assert again.pick(np.array(found, dtype=np.int64)).to_pylist() == as_dicts(found)
    missing = sorted(set(range(row)) - set(found))
    again.append(results(missing))
    again.close()
    third = Journal(folder, SCHEMA)
    third.recover()
    assert third.rows(0, row).to_pylist() == as_dicts(range(row))


def test_segments_rotate_and_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 10_000)
    journal = Journal(tmp_path / "j", SCHEMA)
    for start in range(0, 1000, 20):
        journal.append(results(range(start, start + 20)))
        journal.sync()
    files = sorted((tmp_path / "j").iterdir())
    assert len(files) > 10
    journal.discard_below(500)
    assert len(list((tmp_path / "j").iterdir())) <= len(files) // 2 + 1
    assert sum(entry.rows.nbytes for entry in journal._index) <= 16 * 520
    assert journal.rows(500, 1000).to_pylist() == as_dicts(range(500, 1000))
    journal.discard_below(1000)
    assert list((tmp_path / "j").iterdir()) == []
    journal.append(results([1000]))
    journal.close()
    again = Journal(tmp_path / "j", SCHEMA)
    assert list(again.recover()) == [1000]


def test_maybe_sync_keeps_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called every second, no row stays unsynced for more than fsync_interval."""
    now = 100.0
    synced: list[float] = []
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(segment_module.os, "fsync", lambda descriptor: synced.append(now))
    journal = Journal(tmp_path / "j", SCHEMA, fsync_interval=2.0)
    since: float | None = None
    for second in range(30):
        now = 100.0 + second
        journal.maybe_sync()
        if synced and synced[-1] == now:
            since = None
        assert since is None or now - since < 2.0
        if second % 3 == 0:
            journal.append(results([second]))
            since = since if since is not None else now
    journal.sync()
    synced.clear()
    journal.maybe_sync()
    journal.sync()
    assert synced == []  # nothing new, no fsync


@pytest.mark.parametrize("written", [0, 10, 64, 100])
def test_disk_full_leaves_a_consistent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    journal = Journal(tmp_path / "j", SCHEMA)
    journal.append(results(range(5)))
    journal.sync()
    real, left = os.write, written

    def write(descriptor: int, data: Any) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, memoryview(data)[:left])
        left -= count
        return count

    size = (tmp_path / "j" / "00000000.seg").stat().st_size
    journal.append(results(range(5, 9)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(DiskFull) as caught:
            journal.sync()
    assert caught.value.exit_code == 75
    assert (tmp_path / "j" / "00000000.seg").stat().st_size == size
    journal.sync()  # room again: nothing was lost
    journal.close()
    again = Journal(tmp_path / "j", SCHEMA)
    again.recover()
    assert again.rows(0, 9).to_pylist() == as_dicts(range(9))


def test_a_frame_that_changes_under_us_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", SCHEMA)
    journal.append(results(range(5)))
    journal.sync()
    path = tmp_path / "j" / "00000000.seg"
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    with pytest.raises(JobError, match="has changed on the disk"):
        journal.rows(0, 5)


def test_scattered_rows_read_each_frame_once_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building parts over a scattered window costs frames x parts, not rows x parts."""
    journal = Journal(tmp_path / "j", SCHEMA)
    order = np.random.default_rng(1).permutation(4096)
    for chunk in np.array_split(order, 8):
        journal.append(results(chunk))
    journal.sync()
    frames = len(journal._index)
    reads: list[int] = []
    real = journal_module.read_payload
    monkeypatch.setattr(journal_module, "read_payload", lambda *a: reads.append(1) or real(*a))
    for start in range(0, 4096, 512):
        journal.rows(start, start + 512)
    assert len(reads) <= 8 * frames
    assert frames <= 8 * 2
