"""The feeder hands on each row that is not done, once, as the window has room, and marks the done ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_batch.data.rowset import RowSet
from punica_batch.job import feeder as feeder_module
from punica_batch.job.feeder import Feeder
from punica_batch.planner.window import PendingRow, Window
from punica_batch.types import Request, SamplingParams
from punica_batch.workers.text_pool import PreparedRows


class FakeSource:
    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def work_batches(self, start: int, stop: int) -> Any:
        self.read.append((start, stop))
        for first in range(start, stop, 7):
            yield pa.record_batch({"row": pa.array(range(first, min(first + 7, stop)))})


class FakeText:
    """Answers a chunk at the second poll."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, pa.RecordBatch]] = []

    @property
    def has_room(self) -> bool:
        return len(self.chunks) < 3

    @property
    def is_idle(self) -> bool:
        return not self.chunks

    def submit(self, first_row: int, batch: pa.RecordBatch) -> None:
        assert batch.column(0).to_pylist() == list(range(first_row, first_row + batch.num_rows))
        self.chunks.append((first_row, batch))

    def poll(self) -> list[PreparedRows]:
        if not self.chunks:
            return []
        first, batch = self.chunks.pop(0)
        rows = range(first, first + batch.num_rows)
        requests = tuple(Request(row, np.ones(1, np.int32), None, SamplingParams()) for row in rows)
        return [PreparedRows(first, batch.num_rows, requests, ())]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_each_row_that_is_not_done_comes_once_in_order(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, 120))
    rng = random.Random(total)
    start = data.draw(st.integers(0, total))
    done_rows = data.draw(st.sets(st.integers(start, max(start, total - 1)), max_size=total))
    with pytest.MonkeyPatch.context() as patch:
        for name, high in (("_FIRST_CHUNK_ROWS", 5), ("_CHUNK_ROWS", 9), ("_STRETCH_ROWS", 40)):
            patch.setattr(feeder_module, name, data.draw(st.integers(1, high)))
        done = RowSet()
        done.add_many(np.array(sorted(done_rows), dtype=np.int64))
        window = Window(max_rows=data.draw(st.integers(9, 60)), first_row=done.first_missing(start))
        text: Any = FakeText()
        source: Any = FakeSource()
        feeder = Feeder(source, text, window, done, start=start, stop=total)
        seen: list[int] = []
        for _ in range(2000):
            requests, errors = feeder.pump()
            assert not errors
            seen += [request.row for request in requests]
            for request in requests:
                window.add(PendingRow(request.row, None, 1, 1, request))
            assert window.span <= window.max_span + 40  # rows that are done are marked a stretch at a time
            if rng.random() < 0.7:
                for row in window.next_group(4, "0"):
                    window.mark_finished(row.row)
            if not feeder.more_to_come and not window.num_pending:
                break
        assert seen == [row for row in range(start, total) if row not in done_rows]
        assert not feeder.more_to_come
        assert all(first < last for first, last in source.read)
