"""The text workers as the parent sees them: chunks of rows in, tokenized requests out.

A chunk that takes too long or kills its worker is halved and tried again until the one row is alone; when that row
has ended two workers, it becomes an error row. So a template that never ends costs one row and not the job, and a
worker that is killed from outside costs none.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from punica_batch.errors import PunicaError, RowError, WorkerError
from punica_batch.types import Request, RowResult
from punica_batch.workers.messages import Chunk, Fatal, PreparedChunk, Ready, StartText
from punica_batch.workers.process import ChildProcess

CHUNK_SECONDS = 60.0
MAX_FAILED_STARTS = 3
CHUNKS_IN_FLIGHT = 2  # a worker: one that it works on, one that waits


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The outcome of the rows ``first_row : first_row + num_rows``, each in one of the two."""

    first_row: int
    num_rows: int
    requests: tuple[Request, ...]
    errors: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    first_row: int
    batch: pa.RecordBatch
    is_suspect: bool = False  # one row, with which a worker has died


class _TextWorker:
    def __init__(self) -> None:
        self.epoch = 0
        self.failed_starts = 0
        self.ready = False
        self.process: ChildProcess | None = None
        self.tasks: dict[int, _Task] = {}
        self.busy_since = 0.0


class TextPool:
    def __init__(self, settings: Any, size: int) -> None:
        self._settings = settings
        self._waiting: deque[_Task] = deque()
        self._numbers = itertools.count()
        self._workers = [_TextWorker() for _ in range(size)]
        self._dead: list[PreparedRows] = []
        try:
            for worker in self._workers:
                self._start(worker)
        except BaseException:
            self.close()
            raise

    def _start(self, worker: _TextWorker) -> None:
        worker.epoch += 1
        worker.ready = False
        worker.process = ChildProcess("punica_batch.workers.text_worker")
        worker.process.send(StartText(self._settings, worker.epoch))

    @property
    def has_room(self) -> bool:
        """Whether another chunk would be begun soon; else the caller keeps its rows unread."""
        return len(self._waiting) < len(self._workers)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._dead or any(w.tasks for w in self._workers))

    @property
    def connections(self) -> list[Connection[Any, Any]]:
        """To wait for; ``poll`` when one of them has something."""
        return [w.process.channel.connection for w in self._workers if w.process is not None]

    def submit(self, first_row: int, batch: pa.RecordBatch) -> None:
        self._waiting.append(_Task(first_row, batch))
        self._assign()

    def poll(self) -> list[PreparedRows]:
        """What is ready now; does not wait."""
        done, self._dead = self._dead, []
        for worker in self._workers:
            assert worker.process is not None
            messages, is_alive = worker.process.receive_all()
            for message in messages:
                done += self._handle(worker, message)
            if not is_alive:
                self._bury(worker, "text worker died: " + worker.process.cause_of_death())
            elif worker.ready and worker.tasks and time.monotonic() - worker.busy_since > CHUNK_SECONDS:
                worker.process.kill()
                self._bury(worker, f"rendering and tokenizing took over {CHUNK_SECONDS:.0f} s")
        self._assign()
        return done

    def _handle(self, worker: _TextWorker, message: Any) -> Sequence[PreparedRows]:
        match message:
            case Ready():
                worker.ready, worker.failed_starts, worker.busy_since = True, 0, time.monotonic()
            case PreparedChunk():
                worker.busy_since = time.monotonic()
                task = worker.tasks.pop(message.chunk)
                return [PreparedRows(task.first_row, task.batch.num_rows, message.requests, message.errors)]
            case Fatal(error=error):
                raise error if isinstance(error, PunicaError) else WorkerError(f"text worker: {error}")
        return ()

    def _bury(self, worker: _TextWorker, cause: str) -> None:
        assert worker.process is not None
        worker.process.close()
        if not worker.ready:
            worker.failed_starts += 1
            if worker.failed_starts >= MAX_FAILED_STARTS:
                raise WorkerError(f"the text worker did not come up in {MAX_FAILED_STARTS} tries ({cause})")
        # Chunks are worked on in order: the oldest is the one to blame.
        for position, task in enumerate(worker.tasks.values()):
            if position or not worker.ready:
                self._waiting.appendleft(task)
            elif task.is_suspect:
                error = RowResult.failed(task.first_row, RowError("text_failed", cause))
                self._dead.append(PreparedRows(task.first_row, 1, (), (error,)))
            elif task.batch.num_rows == 1:
                self._waiting.appendleft(_Task(task.first_row, task.batch, is_suspect=True))
            else:
                half = task.batch.num_rows // 2
                self._waiting.appendleft(_Task(task.first_row + half, task.batch.slice(half)))
                self._waiting.appendleft(_Task(task.first_row, task.batch.slice(0, half)))
        worker.tasks = {}
        self._start(worker)

    def _assign(self) -> None:
        for worker in self._workers:
            while self._waiting and len(worker.tasks) < CHUNKS_IN_FLIGHT:
                task, number = self._waiting.popleft(), next(self._numbers)
                if not worker.tasks:
                    worker.busy_since = time.monotonic()
                worker.tasks[number] = task
                assert worker.process is not None
                worker.process.send(Chunk(number, task.first_row, _to_ipc(task.batch)))

    def close(self) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.close()
                worker.process = None


def _to_ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())
