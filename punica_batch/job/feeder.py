"""Reads rows as the window has room, has them tokenized, and hands them on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from punica_batch.data.rowset import RowSet
from punica_batch.data.source import Source
from punica_batch.planner.window import Window
from punica_batch.types import Request, RowResult
from punica_batch.workers.text_pool import TextPool

# Rows that go to a text worker at once: few at first, so that the first batch starts soon.
_FIRST_CHUNK_ROWS = 64
_CHUNK_ROWS = 1024
_STRETCH_ROWS = 65_536  # a stretch of rows without any to do is not read


class Feeder:
    """The rows ``start:stop`` of ``source`` that are not in ``done``, in order, chunk by chunk."""

    def __init__(self, source: Source, text: TextPool, window: Window, done: RowSet, *, start: int, stop: int) -> None:
        self._source = source
        self._text = text
        self._window = window
        self._done = done
        self._chunks = self._read(start, stop)
        self._ahead: tuple[int, pa.RecordBatch] | None = None
        self._is_exhausted = False

    def _read(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Chunks with at least one row to do. The rows that are done already are marked so in the window."""
        size = _FIRST_CHUNK_ROWS
        for first in range(self._done.first_missing(start), stop, _STRETCH_ROWS):
            last = min(first + _STRETCH_ROWS, stop)
            missing = self._done.missing(first, last)
            for row in np.setdiff1d(np.arange(first, last), missing, assume_unique=True).tolist():
                self._window.mark_finished(row)
            if not len(missing):
                continue
            row = int(missing[0])
            for batch in self._source.work_batches(row, int(missing[-1]) + 1):
                while batch.num_rows:
                    chunk, batch = batch.slice(0, size), batch.slice(size)
                    size = _CHUNK_ROWS
                    if self._done.count(row, row + chunk.num_rows) < chunk.num_rows:
                        yield row, chunk
                    row += chunk.num_rows

    @property
    def more_to_come(self) -> bool:
        """Whether rows will still come out of ``pump``."""
        return not (self._is_exhausted and self._text.is_idle)

    def pump(self) -> tuple[list[Request], list[RowResult]]:
        """Sends on what the window has room for. Answers (rows to run, rows in error) that are ready now."""
        while not self._is_exhausted and self._text.has_room:
            if self._ahead is None:
                self._ahead = next(self._chunks, None)
            if self._ahead is None:
                self._is_exhausted = True
            elif self._window.can_read(self._ahead[0] + self._ahead[1].num_rows):
                self._text.submit(*self._ahead)
                self._ahead = None
            else:
                break
        prepared = self._text.poll()
        # A chunk may hold rows that an earlier run has done.
        requests = [r for rows in prepared for r in rows.requests if r.row not in self._done]
        errors = [e for rows in prepared for e in rows.errors if e.row not in self._done]
        return requests, errors
