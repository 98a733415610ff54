"""Sends the window's rows to workers by the placement rules, and takes back what a death or a steal returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from punica_batch.errors import RowError, WorkerError
from punica_batch.planner.placement import WorkerView, place, place_backlog, release, steal
from punica_batch.planner.window import PendingRow, Window
from punica_batch.types import Request, RowResult
from punica_batch.workers.pool import PoolEvent, Worker, WorkerPool
from punica_batch.workers.retries import RetryLedger

# What one row costs the parent's memory beside its tokens: a Request, its SamplingParams, dictionary entries.
_ROW_OVERHEAD_BYTES = 1024


class Dispatcher:
    """Between the window and the pool. ``pump`` sends what can be sent; ``handle`` digests what the pool reports."""

    def __init__(
        self, pool: WorkerPool, window: Window, *, pack: Literal["busiest", "spread"], note: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._window = window
        self._pack = pack
        self._note = note
        self._ledger = RetryLedger()
        self._trial_workers: set[str] = set()  # they run a trial and get nothing else
        self._is_closed = False

    def add(self, requests: Iterable[Request]) -> None:
        for r in requests:
            nbytes = r.prompt_token_ids.nbytes + _ROW_OVERHEAD_BYTES
            self._window.add(PendingRow(r.row, r.lora_id, r.num_prompt_tokens, nbytes, r))

    def close(self) -> None:
        """Admits nothing more: rows that have not started are taken back, those that run go on."""
        self._is_closed = True
        for worker in self._pool.workers:
            self._take_all_back(worker)

    def _take_all_back(self, worker: Worker) -> None:
        if worker.outstanding:
            self._pool.take_back(worker.name, worker.outstanding_sequences)

    @property
    def num_running(self) -> int:
        return sum(len(worker.outstanding) for worker in self._pool.workers)

    def handle(self, event: PoolEvent) -> list[tuple[Request, RowResult]]:
        """The rows that ended with this event. Raises ``WorkerError`` when workers die and nothing gets done."""
        for note in event.notes:
            self._note(f"worker {event.worker}: {note}")
        ended = list(event.finished)
        for request, _ in ended:
            self._ledger.finished(request.row)
        self._window.give_back(request.row for request in event.returned)
        if self._is_closed and event.returned:  # perhaps the few of a steal: one call at a time is under way
            self._take_all_back(self._worker(event.worker))
        if event.died is not None:
            ended += self._recover(event)
        elif event.worker in self._trial_workers and not self._worker(event.worker).outstanding:
            self._trial_workers.discard(event.worker)
        return ended

    def _recover(self, event: PoolEvent) -> list[tuple[Request, RowResult]]:
        self._trial_workers.discard(event.worker)
        self._note(f"worker {event.worker} died ({event.died}); restarting it, {len(event.lost)} rows run again")
        has_others = self._has_others(self._worker(event.worker))
        again, poison = self._ledger.died(event.lost, event.worker, has_others=has_others)
        if self._ledger.exhausted:
            raise WorkerError(f"workers keep dying and no row gets done; the last one: {event.died}")
        self._window.give_back(request.row for request in again)
        error = RowError("worker_died", f"the row ended its worker twice, the last time alone ({event.died})")
        return [(request, RowResult.failed(request.row, error, request.num_prompt_tokens)) for request in poison]

    def pump(self, *, more_to_come: bool) -> None:
        """Sends every row that has a place. ``more_to_come``: rows will still be added to the window."""
        if self._is_closed:
            return
        self._start_trials()
        while (head := self._window.peek()) is not None and (target := self._target(head)) is not None:
            worker, limit = target
            rows = [row.payload for row in self._window.next_group(limit, worker.name)]
            self._pool.submit(worker.name, [r for r in rows if isinstance(r, Request)])
        if not more_to_come and not self._window.num_pending and not self._ledger.has_trial:
            self._drain()

    def _start_trials(self) -> None:
        for worker in self._pool.workers:
            if not self._ledger.has_trial:
                return
            if worker.state == "running" and not worker.outstanding:
                trial = self._ledger.next_trial(worker.name if self._has_others(worker) else None)
                if trial is not None:
                    self._trial_workers.add(worker.name)
                    self._pool.submit(worker.name, trial)

    def _target(self, head: PendingRow) -> tuple[Worker, int] | None:
        """(the worker for the next group, how many rows it may get)"""
        request = head.payload
        assert isinstance(request, Request)
        sequences = request.sampling.n
        views = self._views()
        blocks = max((w.blocks_for(request) for w in self._pool.workers), default=0)
        name = place(views, head.lora_id, blocks, rows=sequences, pack=self._pack)
        is_backlog = name is None
        if name is None:
            name = place_backlog(views, head.lora_id, rows=sequences)
        if name is None:
            return None
        view = next(v for v in views if v.name == name)
        places = view.max_num_seqs - view.backlog if is_backlog else view.free_places
        return self._worker(name), max(1, places // sequences)

    def _drain(self) -> None:
        views = self._views()
        theft = steal(views)
        if theft is not None:
            self._pool.take_back(theft.victim, theft.count)
        elif not any(w.take_back_pending for w in self._pool.workers):
            for name in release(views, self._window.num_pending):
                # The last worker stays: another's death may still give it rows.
                if sum(w.state != "released" for w in self._pool.workers) > 1:
                    self._pool.release(name)

    def _has_others(self, worker: Worker) -> bool:
        return any(other is not worker and other.state != "released" for other in self._pool.workers)

    def _worker(self, name: str) -> Worker:
        return next(w for w in self._pool.workers if w.name == name)

    def _views(self) -> list[WorkerView]:
        return [
            _view(w, active=w.state == "running" and not (w.name in self._trial_workers or self._ledger.has_trial))
            for w in self._pool.workers
        ]


def _view(worker: Worker, *, active: bool) -> WorkerView:
    running = min(worker.outstanding_sequences, worker.max_num_seqs)
    total = worker.capacity.num_blocks if worker.capacity else 0
    used = worker.stats.kv_blocks_used if worker.stats else 0
    return WorkerView(
        name=worker.name,
        running=running,
        backlog=worker.outstanding_sequences - running,
        free_blocks=max(0, total - max(used, worker.blocks_reserved)),
        max_num_seqs=worker.max_num_seqs,
        rows_by_adapter=worker.sequences_by_adapter,
        active=active,
    )
