"""The dispatcher over a simulated pool: every row ends exactly once, whatever dies, is stolen or comes late."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_batch.errors import WorkerError
from punica_batch.planner.window import Window
from punica_batch.types import Completion, FinishReason, Request, RowResult, SamplingParams
from punica_batch.workers.dispatch import Dispatcher
from punica_batch.workers.messages import Ready
from punica_batch.workers.pool import PoolEvent, Worker, WorkerSpec

BLOCK = 4


class Simulated:
    """One worker's own side: what waits and what runs on it."""

    def __init__(self, ready_in: int) -> None:
        self.ready_in = ready_in
        self.waiting: list[Request] = []
        self.running: list[Request] = []


class SimulatedPool:
    """A ``WorkerPool`` whose workers start late, end rows in any order, and die of poison rows or by chance.

    Chance spares a worker with one row: what dies alone twice is poison, however it died.
    """

    def __init__(
        self, count: int, max_num_seqs: int, rng: random.Random, *, poison: frozenset[int] = frozenset(),
        deaths: float = 0.0, late: int = 3,
    ) -> None:  # fmt: skip
        self._rng, self._poison, self._deaths, self._late = rng, poison, deaths, late
        self._max_num_seqs = max_num_seqs
        self._workers = {f"{i:02}": Worker(WorkerSpec(f"{i:02}", None)) for i in range(count)}
        self._inside = {name: Simulated(rng.randint(0, late)) for name in self._workers}
        self._take_backs: dict[str, int] = {}
        self.stolen = 0
        self.ran: Counter[int] = Counter()
        self.on: dict[int, str] = {}

    @property
    def workers(self) -> Sequence[Worker]:
        return tuple(self._workers.values())

    def submit(self, name: str, requests: Sequence[Request]) -> None:
        worker = self._workers[name]
        assert worker.state == "running"
        assert requests
        worker.add(requests)
        self._inside[name].waiting += requests

    def take_back(self, name: str, count: int) -> None:
        worker = self._workers[name]
        if not worker.take_back_pending:
            worker.take_back_pending = True
            self._take_backs[name] = count

    def release(self, name: str) -> None:
        worker = self._workers[name]
        assert not worker.outstanding
        worker.state = "released"

    def close(self) -> None:
        pass

    def poll(self, timeout: float = 0.0, also: Sequence[Connection[Any, Any]] = ()) -> list[PoolEvent]:
        return [event for worker in self.workers if worker.state != "released" for event in self._poll(worker)]

    def _poll(self, worker: Worker) -> list[PoolEvent]:
        inside = self._inside[worker.name]
        if worker.state != "running":
            inside.ready_in -= 1
            if inside.ready_in < 0:
                worker.state, worker.capacity = "running", Ready(1, self._max_num_seqs, 64, BLOCK)
            return []
        while inside.waiting and sum(r.sampling.n for r in inside.running) < self._max_num_seqs:
            inside.running.append(inside.waiting.pop(0))
        here = [*inside.running, *inside.waiting]
        is_poisoned = any(r.row in self._poison for r in inside.running)
        if is_poisoned or (len(here) > 1 and self._rng.random() < self._deaths):
            return [self._die(worker, inside)]
        events = []
        if worker.name in self._take_backs:
            count = self._take_backs.pop(worker.name)
            back = inside.waiting[max(0, len(inside.waiting) - count) :]
            del inside.waiting[max(0, len(inside.waiting) - count) :]
            worker.take_back_pending = False
            for request in back:
                worker.remove(request.row)
            self.stolen += len(back)
            events.append(PoolEvent(worker.name, returned=tuple(back)))
        ended = [r for r in inside.running if self._rng.random() < 0.4]
        inside.running = [r for r in inside.running if r not in ended]
        self.ran.update(r.row for r in ended)
        self.on |= {r.row: worker.name for r in ended}
        for request in ended:
            worker.remove(request.row)
        return [*events, PoolEvent(worker.name, finished=tuple((r, answer(r)) for r in ended))]

    def _die(self, worker: Worker, inside: Simulated) -> PoolEvent:
        lost = worker.remove_all()
        assert {r.row for r in lost} == {r.row for r in [*inside.running, *inside.waiting]}
        inside.running, inside.waiting, inside.ready_in = [], [], self._rng.randint(0, self._late)
        self._take_backs.pop(worker.name, None)
        worker.state, worker.capacity, worker.take_back_pending = "restarting", None, False
        return PoolEvent(worker.name, lost=lost, died="killed by SIGKILL")


def answer(request: Request) -> RowResult:
    return RowResult(request.row, request.num_prompt_tokens, (Completion((1,), "x", FinishReason.STOP),))


def request(row: int, lora_id: str | None = None, n: int = 1, tokens: int = 3) -> Request:
    return Request(row, np.ones(tokens, np.int32), lora_id, SamplingParams(n=n))


def drive(pool: SimulatedPool, requests: list[Request], rng: random.Random, **options: Any) -> list[RowResult]:
    """Feeds the rows in bursts until all have ended; fails when nothing happens for long."""
    window = Window()
    dispatcher = Dispatcher(pool, window, pack=options.get("pack", "busiest"), note=lambda line: None)
    results: list[RowResult] = []
    unread = list(requests)
    for _ in range(20_000):
        if len(results) == len(requests):
            assert window.span == window.nbytes == window.num_pending == 0
            return results
        burst, unread = unread[: (size := rng.randint(0, 12))], unread[size:]
        dispatcher.add(burst)
        dispatcher.pump(more_to_come=bool(unread))
        for event in pool.poll():
            for _, result in dispatcher.handle(event):
                results.append(result)
                window.mark_finished(result.row)
    raise AssertionError(f"{len(results)} of {len(requests)} rows ended, then nothing")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_row_ends_exactly_once(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    workers, batch = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    count = data.draw(st.integers(1, 150))
    poison = frozenset(data.draw(st.sets(st.integers(0, count - 1), max_size=2)))
    deaths = data.draw(st.sampled_from([0.0, 0.02, 0.1]))
    pool = SimulatedPool(workers, batch, rng, poison=poison, deaths=deaths)
    rows = [
        request(row, rng.choice([None, "a", "b", "c"]), rng.choice([1, 1, 1, 2, batch, batch + 3]), rng.randint(1, 30))
        for row in range(count)
    ]
    results = drive(pool, rows, rng, pack=data.draw(st.sampled_from(["busiest", "spread"])))
    assert sorted(result.row for result in results) == list(range(count))
    assert {result.row for result in results if result.error is not None} == poison
    assert set(pool.ran) == set(range(count)) - poison
    assert set(pool.ran.values()) <= {1}
    assert any(worker.state != "released" for worker in pool.workers)
    if not poison and not deaths:
        assert sum(worker.epoch for worker in pool.workers) == 0


def test_a_late_worker_takes_rows_from_long_backlogs() -> None:
    """Two workers have their batches and backlogs full when the third comes and the parent has nothing left."""
    pool = SimulatedPool(3, 8, random.Random(1), late=0)
    pool._inside["02"].ready_in = 1
    dispatcher, window = Dispatcher(pool, Window(), pack="busiest", note=lambda line: None), set(range(32))
    pool.poll()
    dispatcher.add([request(row) for row in range(32)])
    while window:
        dispatcher.pump(more_to_come=False)
        for event in pool.poll():
            window -= {result.row for _, result in dispatcher.handle(event)}
    assert 0 < pool.stolen <= 8  # what exceeds the thief's batch
    assert "02" in pool.on.values()
    assert set(pool.ran.values()) == {1}


def test_rows_of_an_adapter_stay_together_and_idle_workers_are_released() -> None:
    rng = random.Random(2)
    pool = SimulatedPool(4, 64, rng, late=0)
    for _ in range(2):
        pool.poll()
    results = drive(pool, [request(row, f"a{row % 3}") for row in range(60)], rng)
    assert len(results) == 60
    assert len(set(pool.on.values())) == 1  # the busiest rule packs what one worker can hold
    window = Window()
    dispatcher = Dispatcher(pool, window, pack="busiest", note=lambda line: None)
    dispatcher.pump(more_to_come=False)
    assert [worker.state for worker in pool.workers].count("released") == 3


def test_spread_uses_all_workers() -> None:
    rng = random.Random(2)
    pool = SimulatedPool(4, 64, rng, late=0)
    pool.poll()
    drive(pool, [request(row) for row in range(200)], rng, pack="spread")
    assert len(set(pool.on.values())) == 4


def test_workers_that_die_of_everything_end_the_job() -> None:
    rng = random.Random(5)
    rows = [request(row) for row in range(100)]
    pool = SimulatedPool(2, 8, rng, poison=frozenset(range(100)))
    with pytest.raises(WorkerError, match="keep dying"):
        drive(pool, rows, rng)


@pytest.mark.parametrize("seed", range(5))
def test_closing_admits_nothing_more(seed: int) -> None:
    """Rows that run go on and end; those that wait, stolen ones too, come back and are not sent again."""
    rng = random.Random(seed)
    pool = SimulatedPool(3, 4, rng, late=0)
    window = Window()
    dispatcher = Dispatcher(pool, window, pack="busiest", note=lambda line: None)
    pool.poll()
    dispatcher.add([request(row) for row in range(60)])
    dispatcher.pump(more_to_come=False)
    for event in pool.poll():
        for _, result in dispatcher.handle(event):
            window.mark_finished(result.row)
    pool.take_back("00", 1)  # a steal is under way
    ended = set(pool.ran)
    running = {r.row for inside in pool._inside.values() for r in inside.running}
    dispatcher.close()
    for _ in range(200):
        dispatcher.pump(more_to_come=False)
        for event in pool.poll():
            for _, result in dispatcher.handle(event):
                window.mark_finished(result.row)
    assert dispatcher.num_running == 0
    begun_at_close = 3 * 4  # a poll lets each worker fill its batch once before it hears of the take-back
    assert running <= set(pool.ran)
    assert len(set(pool.ran) - ended - running) <= begun_at_close
    assert window.num_pending == 60 - len(pool.ran)


class SickPool(SimulatedPool):
    """Worker 00 comes up again and again and dies of whatever it is given, as on a GPU that fails."""

    def _poll(self, worker: Any) -> Any:
        inside = self._inside[worker.name]
        if worker.name == "00" and worker.state == "running" and (inside.waiting or inside.running):
            return [self._die(worker, inside)]
        return super()._poll(worker)


class Slow(random.Random):
    """Rows take some 25 polls, so that the worker that has nothing to do is mostly the sick one."""

    def random(self) -> float:
        return 10 * super().random()


@pytest.mark.parametrize("workers", [2, 8])
def test_one_sick_worker_costs_no_row(workers: int) -> None:
    results = drive(SickPool(workers, 16, Slow(0), late=2), [request(row) for row in range(1500)], random.Random(0))
    assert sorted(result.row for result in results) == list(range(1500))
    assert all(result.error is None for result in results)
