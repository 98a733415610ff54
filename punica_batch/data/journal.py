"""The journal: finished rows on disk within seconds, in whatever order they finished. What a resume trusts.

Only the parent process writes. Finished rows are buffered, written as one checksummed Arrow IPC batch (a *frame*, see
``segment``) and fsynced together, at the latest ``fsync_interval`` seconds after they came as long as ``maybe_sync``
is called at least every second. Segment files are ``00000000.seg``, ``00000001.seg``…; a new one is begun at 8 MiB and
by every process, so a recovered file is never appended to. A segment is deleted when all its rows are committed.

Recovery reads every good frame, cuts what follows the last one, and keeps one record of each row: the first, except
that a success takes the place of an error (that is how ``retry`` on an unfinished output is remembered).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.disk import disk_errors, make_folder
from punica_batch.data.rowset import RowSet
from punica_batch.data.schema import results_to_batch
from punica_batch.data.segment import Frame, SegmentWriter, read_payload, recover_frames
from punica_batch.errors import JobError
from punica_batch.types import RowResult

SEGMENT_BYTES = 8 << 20
FRAME_ROWS = 512
FRAME_TOKENS = 1 << 16  # completion tokens in a frame, which bound its size with log-probabilities


@dataclass(slots=True)
class _Indexed:
    """A frame on disk. ``rows`` int64, in the frame's order; -1 where another record of the row counts."""

    segment: int
    frame: Frame
    rows: NDArray[np.int64]
    last: int  # largest row


class Journal:
    """Append-only, checksummed ``RowResult``s in ``folder``; ``schema`` is ``result_schema``'s."""

    def __init__(self, folder: Path, schema: pa.Schema, *, fsync_interval: float = 2.0) -> None:
        make_folder(folder)
        self._folder = folder
        self.schema = schema
        self._schema = schema.insert(0, pa.field("row", pa.int64(), nullable=False))
        self._fsync_interval = fsync_interval
        self._index: list[_Indexed] = []
        self._last_row: dict[int, int] = {}  # of each segment on disk
        self._present = RowSet()
        self.failed = RowSet()  # of the rows present, those in error
        self._pending: list[RowResult] = []
        self._pending_tokens = 0
        self._unsynced_since: float | None = None
        self._writer: SegmentWriter | None = None
        self._next_segment = 1 + max((int(path.stem) for path in self._segments()), default=-1)

    def _segments(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("*.seg") if path.stem.isdecimal())

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.seg"

    @property
    def present(self) -> RowSet:
        """The rows that have been journalled, those appended but not yet synced included."""
        return self._present

    def recover(self, *, forget_errors: bool = False) -> RowSet:
        """Read what is there, once, before the first ``append``; returns the rows present.

        ``forget_errors`` leaves out error records, so that their rows run again.
        """
        assert not self._index, "recover comes first"
        holders: dict[int, _Indexed] = {}  # of error records, which a later success replaces
        for path in self._segments():
            segment = int(path.stem)
            for frame, payload in recover_frames(path):
                self._recover_frame(segment, frame, payload, forget_errors, holders)
            self._last_row.setdefault(segment, -1)
        return self._present

    def _recover_frame(
        self, segment: int, frame: Frame, payload: bytes, forget_errors: bool, holders: dict[int, _Indexed]
    ) -> None:
        batch = self._decode(payload, self._path(segment))
        numbers = batch.column("row").to_numpy().copy()
        failed = batch.column("error").is_valid().to_numpy(zero_copy_only=False)
        duplicate = self._present.contains_many(numbers) | _repeated(numbers)
        for position in np.flatnonzero(duplicate & ~failed):
            row = int(numbers[position])
            if row in holders:
                holder = holders.pop(row)
                holder.rows[holder.rows == row] = -1
                self.failed.discard(row)
                duplicate[position] = False
        keep = ~duplicate & ~(failed & forget_errors)
        entry = _Indexed(segment, frame, np.where(keep, numbers, -1), int(numbers.max(initial=-1)))
        self._register(entry)
        holders.update((int(row), entry) for row in numbers[keep & failed])
        self.failed.add_many(numbers[keep & failed])

    def _register(self, entry: _Indexed) -> None:
        self._present.add_many(entry.rows[entry.rows >= 0])
        self._last_row[entry.segment] = max(entry.last, self._last_row.get(entry.segment, -1))
        self._index.append(entry)

    def append(self, results: Sequence[RowResult]) -> None:
        """Take finished rows; a row that is already there is dropped. Durable after the next ``sync``.

        Raises ``DiskFull`` or ``JobError`` when a full buffer cannot be written.
        """
        for result in results:
            if result.row in self._present:
                continue
            self._present.add(result.row)
            if result.error is not None:
                self.failed.add(result.row)
            self._pending.append(result)
            self._pending_tokens += sum(len(sample.token_ids) for sample in result.completions)
            self._unsynced_since = self._unsynced_since or time.monotonic()
            if len(self._pending) >= FRAME_ROWS or self._pending_tokens >= FRAME_TOKENS:
                self._write()

    def maybe_sync(self) -> None:
        """Sync when the oldest unsynced row would otherwise pass ``fsync_interval`` before the next call."""
        if self._unsynced_since is not None and time.monotonic() - self._unsynced_since >= self._fsync_interval / 2:
            self.sync()

    def sync(self) -> None:
        """Write and fsync everything appended so far. Raises ``DiskFull`` or ``JobError``; nothing is lost then."""
        self._write()
        if self._unsynced_since is not None and self._writer is not None:
            self._writer.fsync()
        self._unsynced_since = None

    def _write(self) -> None:
        if not self._pending:
            return
        if self._writer is not None and self._writer.size >= SEGMENT_BYTES:
            self._close_segment()
        if self._writer is None:
            self._writer = SegmentWriter(self._path(self._next_segment))
            self._next_segment += 1
        batch = results_to_batch(self._pending, self._schema)
        frame = self._writer.append(memoryview(batch.serialize()))
        rows = batch.column("row").to_numpy().copy()
        segment = int(self._writer.path.stem)
        self._register(_Indexed(segment, frame, rows, int(rows.max())))
        self._pending, self._pending_tokens = [], 0

    def _close_segment(self) -> None:
        if self._writer is not None:
            self._writer.fsync()
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Sync and close. The journal cannot be appended to afterwards."""
        self.sync()
        self._close_segment()

    def _decode(self, payload: bytes, path: Path) -> pa.RecordBatch:
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(payload), self._schema)
            batch.validate()
        except (pa.ArrowInvalid, OSError) as error:
            raise JobError(f"{path} has other columns than this job's: start over with `run --overwrite`") from error
        return batch

    def rows(self, start: int, stop: int) -> pa.Table:
        """The result columns of rows ``start`` to ``stop - 1``, in order.

        Raises ``JobError`` naming the first row that is missing.
        """
        return self.pick(np.arange(start, stop))

    def pick(self, wanted: NDArray[np.int64]) -> pa.Table:
        """The result columns of the rows ``wanted``, which ascend. Raises ``JobError`` naming one that is missing."""
        self._write()
        found, numbers = [], []
        start, stop = (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (0, 0)
        for entry in self._index:
            picked = np.flatnonzero((entry.rows >= start) & (entry.rows < stop))
            if stop - start > len(wanted):
                picked = picked[np.isin(entry.rows[picked], wanted)]
            if len(picked):
                path = self._path(entry.segment)
                found.append(self._decode(read_payload(path, entry.frame), path).take(pa.array(picked)))
                numbers.append(entry.rows[picked])
        order = np.argsort(np.concatenate(numbers)) if numbers else np.empty(0, np.int64)
        if len(order) != len(wanted):
            missing = np.setdiff1d(wanted, np.concatenate(numbers) if numbers else order)[0]
            raise JobError(f"row {missing} is not in the journal {self._folder}: run the same command again")
        table = pa.Table.from_batches(found, schema=self._schema) if found else self._schema.empty_table()
        return table.take(pa.array(order)).combine_chunks().drop_columns(["row"])

    def iter_rows(self, start: int, stop: int, max_bytes: int = 64 << 20) -> Iterator[pa.Table]:
        """``rows(start, stop)`` in pieces of about ``max_bytes``."""
        self._write()
        size = sum(
            entry.frame.length * int(((entry.rows >= start) & (entry.rows < stop)).sum()) / max(len(entry.rows), 1)
            for entry in self._index
        )
        step = max(1, (stop - start) // max(1, round(size / max_bytes)))
        for first in range(start, stop, step):
            yield self.rows(first, min(first + step, stop))

    def discard_below(self, row: int) -> None:
        """Forget rows below ``row``, and delete the segment files that hold no others."""
        self._index = [entry for entry in self._index if entry.last >= row]
        for segment, last in list(self._last_row.items()):
            if last >= row:
                continue
            if self._writer is not None and int(self._writer.path.stem) == segment:
                if self._pending or self._unsynced_since is not None:
                    continue
                self._close_segment()
            path = self._path(segment)
            crashpoint("journal.discard.before")
            with disk_errors("delete", path):
                path.unlink(missing_ok=True)
            crashpoint("journal.discard.after")
            del self._last_row[segment]


def _repeated(numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool: which entries equal an earlier one."""
    repeated = np.ones(len(numbers), dtype=np.bool_)
    repeated[np.unique(numbers, return_index=True)[1]] = False
    return repeated
