"""The engine workers as the parent sees them: start, submit, poll, death and restart.

``WorkerPool`` is the interface: local processes now; a pool of actors on other machines can stand in its place, since
all that passes is plain data.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Protocol

from punica_batch.errors import PunicaError, WorkerError
from punica_batch.types import Request, RowResult, WorkerStats
from punica_batch.workers.affinity import Cores
from punica_batch.workers.messages import (
    Fatal,
    Finished,
    Heartbeat,
    Ready,
    Returned,
    StartEngine,
    Submit,
    TakeBack,
)
from punica_batch.workers.process import ChildProcess

MAX_FAILED_STARTS = 3
RATE_SECONDS = 10.0
# A worker with work that says nothing for so long hangs: it speaks after every step, and no step takes minutes.
SILENCE_SECONDS = 900.0
RATE_MARK_SECONDS = 0.2

State = Literal["starting", "running", "restarting", "released"]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What one worker is started with. ``name`` is its UUID in the placement rule (a CPU worker's padded number);
    ``cores``: the logical CPUs that it is bound to (empty: to none)."""

    name: str
    settings: Any  # engine.settings.EngineSettings
    env: dict[str, str] = field(default_factory=dict)
    num_threads: int | None = None
    cores: Cores = frozenset()


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """What happened at one worker. ``lost``: rows that were on it when it died, for the reason ``died``; ``notes``:
    sentences for the user."""

    worker: str
    finished: tuple[tuple[Request, RowResult], ...] = ()
    returned: tuple[Request, ...] = ()
    lost: tuple[Request, ...] = ()
    died: str | None = None
    notes: tuple[str, ...] = ()


class WorkerPool(Protocol):
    @property
    def workers(self) -> Sequence[Worker]: ...
    def poll(self, timeout: float, also: Sequence[Connection[Any, Any]] = ()) -> list[PoolEvent]: ...
    def submit(self, name: str, requests: Sequence[Request]) -> None: ...
    def take_back(self, name: str, count: int) -> None: ...
    def release(self, name: str) -> None: ...
    def close(self) -> None: ...


class Worker:
    """One worker's state, in the parent's view: it may be a moment behind the worker's own."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.state: State = "starting"
        self.epoch = 0
        self.failed_starts = 0
        self.capacity: Ready | None = None  # None until it is ready
        self.stats: WorkerStats | None = None
        self.outstanding: dict[int, Request] = {}
        self.outstanding_sequences = 0
        self.sequences_by_adapter: Counter[str | None] = Counter()
        self.blocks_reserved = 0  # KV blocks for the prompts of the outstanding rows and one more token each
        self.take_back_pending = False
        self.process: ChildProcess | None = None
        self.heard_at = 0.0
        self.prompt_tokens = 0  # these two over all its lives: a restart begins a new count of stats
        self.generated_tokens = 0
        self._rate_marks: list[tuple[float, int]] = []

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def max_num_seqs(self) -> int:
        return self.capacity.max_num_seqs if self.capacity else 0

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.outstanding[request.row] = request
            self._count(request, 1)

    def remove(self, row: int) -> Request | None:
        request = self.outstanding.pop(row, None)
        if request is not None:
            self._count(request, -1)
        return request

    def remove_all(self) -> tuple[Request, ...]:
        return tuple(r for row in list(self.outstanding) if (r := self.remove(row)) is not None)

    def _count(self, request: Request, sign: int) -> None:
        self.outstanding_sequences += sign * request.sampling.n
        self.sequences_by_adapter[request.lora_id] += sign * request.sampling.n
        if not self.sequences_by_adapter[request.lora_id]:
            del self.sequences_by_adapter[request.lora_id]
        self.blocks_reserved += sign * self.blocks_for(request)

    def blocks_for(self, request: Request) -> int:
        size = self.capacity.block_size if self.capacity else 1
        return request.sampling.n * (request.num_prompt_tokens // size + 1)

    def observe(self, stats: WorkerStats) -> None:
        self.prompt_tokens += stats.prompt_tokens - (self.stats.prompt_tokens if self.stats else 0)
        self.generated_tokens += stats.generated_tokens - (self.stats.generated_tokens if self.stats else 0)
        self.stats = stats
        now = time.monotonic()
        if self._rate_marks and now - self._rate_marks[-1][0] < RATE_MARK_SECONDS:
            return
        recent = [m for m in self._rate_marks if now - m[0] < RATE_SECONDS] or self._rate_marks[-1:]
        self._rate_marks = [*recent, (now, self.generated_tokens)]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second over the last ten seconds, 0 without work."""
        if len(self._rate_marks) < 2 or not self.outstanding:
            return 0.0
        (t0, n0), (t1, n1) = self._rate_marks[0], self._rate_marks[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0


class LocalPool:
    """One child process a worker on this machine."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._workers = {spec.name: Worker(spec) for spec in specs}
        try:
            for worker in self._workers.values():
                self._start(worker)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> Sequence[Worker]:
        return tuple(self._workers.values())

    def _start(self, worker: Worker) -> None:
        worker.epoch += 1
        worker.stats = None
        worker.take_back_pending = False
        worker.process = ChildProcess("punica_batch.workers.worker", worker.spec.env, worker.spec.cores)
        worker.process.send(StartEngine(worker.spec.settings, worker.epoch, worker.spec.num_threads))

    def submit(self, name: str, requests: Sequence[Request]) -> None:
        worker = self._workers[name]
        assert worker.process is not None
        if not worker.outstanding:
            worker.heard_at = time.monotonic()
        worker.add(requests)
        worker.process.send(Submit(tuple(requests)))

    def take_back(self, name: str, count: int) -> None:
        worker = self._workers[name]
        if worker.process is not None and not worker.take_back_pending:
            worker.take_back_pending = worker.process.send(TakeBack(count))

    def poll(self, timeout: float, also: Sequence[Connection[Any, Any]] = ()) -> list[PoolEvent]:
        """Waits until a worker (or one of ``also``) has something to say. Raises ``WorkerError`` when a worker
        does not come up, and the worker's own error when that is why."""
        alive = [w for w in self._workers.values() if w.process is not None]
        heard = wait([*(w.process.channel.connection for w in alive if w.process), *also], timeout)
        for worker in alive:
            self._watch(worker)
        return [e for w in alive if w.process and w.process.channel.connection in heard for e in self._receive(w)]

    def _watch(self, worker: Worker) -> None:
        """Kills a worker that hangs; its end of stream then tells the rest, as at any death."""
        is_silent = time.monotonic() - worker.heard_at > SILENCE_SECONDS
        if is_silent and worker.outstanding and worker.process is not None:
            worker.heard_at = time.monotonic()
            worker.process.kill()

    def _receive(self, worker: Worker) -> list[PoolEvent]:
        assert worker.process is not None
        worker.heard_at = time.monotonic()
        messages, is_alive = worker.process.receive_all()
        events = [e for m in messages if m.epoch == worker.epoch and (e := self._handle(worker, m)) is not None]
        if not is_alive:
            events.append(self._bury(worker))
        return events

    def _handle(self, worker: Worker, message: Any) -> PoolEvent | None:
        match message:
            case Ready():
                worker.capacity, worker.state, worker.failed_starts = message, "running", 0
                return PoolEvent(worker.name, notes=message.notes)
            case Heartbeat(stats=stats):
                worker.observe(stats)
            case Finished(results=results):
                known = tuple((q, r) for r in results if (q := worker.remove(r.row)) is not None)
                return PoolEvent(worker.name, finished=known)
            case Returned(rows=rows):
                worker.take_back_pending = False
                back = tuple(r for row in rows if (r := worker.remove(row)) is not None)
                return PoolEvent(worker.name, returned=back)
            case Fatal(error=error):
                raise error if isinstance(error, PunicaError) else WorkerError(f"worker {worker.name}: {error}")
        return None

    def _bury(self, worker: Worker) -> PoolEvent:
        """The worker died: start it again, and hand back what it held."""
        assert worker.process is not None
        cause = worker.process.cause_of_death()
        worker.process.close()
        worker.process = None
        if worker.capacity is None:
            worker.failed_starts += 1
            if worker.failed_starts >= MAX_FAILED_STARTS:
                raise WorkerError(
                    f"worker {worker.name} did not come up in {MAX_FAILED_STARTS} tries ({cause}); "
                    "run `punica-batch doctor` to see what this machine lacks"
                )
        lost = worker.remove_all()
        worker.capacity = None
        worker.state = "restarting"
        self._start(worker)
        return PoolEvent(worker.name, lost=lost, died=cause)

    def release(self, name: str) -> None:
        """Ends a worker that has nothing left to do; it stays released."""
        worker = self._workers[name]
        assert not worker.outstanding
        worker.state = "released"
        if worker.process is not None:
            worker.process.close()
            worker.process = None

    def close(self) -> None:
        for worker in self._workers.values():
            if worker.process is not None:
                worker.process.kill()
                worker.process.close()
                worker.process = None
