"""Chunks of rows through text workers that hang, die or are killed: each row once, only guilty ones in error."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_batch.errors import InputError, WorkerError
from punica_batch.types import Request, SamplingParams
from punica_batch.workers import text_pool
from punica_batch.workers.messages import Chunk, Fatal, PreparedChunk, Ready, StartText
from punica_batch.workers.text_pool import PreparedRows, TextPool


class FakeChild:
    """In place of ``ChildProcess``: works on one chunk a ``receive_all``. ``world`` says what goes wrong."""

    world: World

    def __init__(self, module: str, env: Any = None) -> None:
        self._inbox: list[Any] = []
        self._is_dead = False
        self.channel = SimpleNamespace(connection=None)

    def send(self, message: object) -> bool:
        self._inbox.append(message)
        return not self._is_dead

    def receive_all(self) -> tuple[list[Any], bool]:
        world = self.world
        if self._is_dead or not self._inbox:
            return [], not self._is_dead
        message = self._inbox.pop(0)
        if isinstance(message, StartText):
            return world.start(message)
        if world.kills > 0 and world.rng.random() < 0.3:
            world.kills -= 1
            return [], False
        assert isinstance(message, Chunk)
        (value,) = pa.ipc.open_stream(message.ipc).read_all().columns
        rows = value.to_pylist()
        assert rows == list(range(message.first_row, message.first_row + len(rows)))
        if set(rows) & world.poison:
            return [], False
        requests = tuple(Request(row, np.ones(1, np.int32), None, SamplingParams()) for row in rows)
        return [PreparedChunk(message.chunk, message.chunk, requests, ())], True

    def cause_of_death(self) -> str:
        return "killed by SIGKILL"

    def kill(self) -> None:
        self._is_dead = True

    def close(self) -> None:
        self._is_dead = True


class World:
    def __init__(self, seed: int = 0, poison: frozenset[int] = frozenset(), kills: int = 0, how: str = "") -> None:
        self.rng, self.poison, self.kills, self._how = random.Random(seed), poison, kills, how

    def start(self, message: StartText) -> tuple[list[Any], bool]:
        if self._how == "fatal":
            return [Fatal(message.epoch, InputError("the template is wrong"))], True
        return ([], False) if self._how == "dies" else ([Ready(message.epoch)], True)


def run(world: World, sizes: list[int], workers: int) -> list[PreparedRows]:
    pool = TextPool(None, workers)
    results: list[PreparedRows] = []
    first, chunks = 0, []
    for size in sizes:
        chunks.append((first, pa.record_batch({"row": pa.array(range(first, first + size))})))
        first += size
    for _ in range(10_000):
        while chunks and pool.has_room:
            pool.submit(*chunks.pop(0))
        results += pool.poll()
        if not chunks and pool.is_idle:
            pool.close()
            return results
    raise AssertionError("the pool never finished")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pool, "ChildProcess", FakeChild)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_row_once_and_only_poison_rows_in_error(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    poison = frozenset(data.draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=3)))
    # One kill from outside condemns nobody, wherever it strikes.
    world = FakeChild.world = World(data.draw(st.integers(0, 1000)), poison, kills=data.draw(st.integers(0, 1)))
    results = run(world, sizes, data.draw(st.integers(1, 3)))
    rows = [r.row for result in results for r in result.requests]
    errors = [e for result in results for e in result.errors]
    assert sorted(rows) == sorted(set(range(sum(sizes))) - poison)
    assert sorted(e.row for e in errors) == sorted(poison)
    assert all(e.error == "text_failed: text worker died: killed by SIGKILL" for e in errors)
    assert sum(result.num_rows for result in results) == sum(sizes)


def test_a_worker_that_cannot_start() -> None:
    FakeChild.world = World(how="dies")
    with pytest.raises(WorkerError, match="did not come up in 3 tries"):
        run(FakeChild.world, [5], 1)
    FakeChild.world = World(how="fatal")
    with pytest.raises(InputError, match="template is wrong"):
        run(FakeChild.world, [5], 1)


def test_a_row_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while a worker sits on the row's chunk."""
    now = [0.0]
    monkeypatch.setattr(text_pool.time, "monotonic", lambda: now[0])

    class Hanging(FakeChild):
        is_stuck = False

        def receive_all(self) -> tuple[list[Any], bool]:
            messages, is_alive = super().receive_all()
            if not is_alive and not self._is_dead:
                self.is_stuck = True
            if self.is_stuck:
                now[0] += text_pool.CHUNK_SECONDS + 1
                return [], True
            return messages, is_alive

    monkeypatch.setattr(text_pool, "ChildProcess", Hanging)
    FakeChild.world = World(poison=frozenset({5}))
    results = run(FakeChild.world, [8, 8], 1)
    (error,) = [e for result in results for e in result.errors]
    assert error.row == 5
    assert error.error == "text_failed: rendering and tokenizing took over 60 s"
    assert sorted(r.row for result in results for r in result.requests) == [r for r in range(16) if r != 5]


def test_connections_are_those_of_living_workers() -> None:
    FakeChild.world = World()
    pool = TextPool(None, 2)
    connections: list[Connection[Any, Any]] = pool.connections
    assert len(connections) == 2
    pool.close()
    assert pool.connections == []
