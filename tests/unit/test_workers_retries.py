"""Which rows run again after a worker's death: innocent rows survive, poison rows are found, in bounded tries."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from punica_batch.types import Request, SamplingParams
from punica_batch.workers.retries import MAX_FRUITLESS_DEATHS, RetryLedger


def requests(rows: range) -> list[Request]:
    return [Request(row, np.array([1, 2], np.int32), None, SamplingParams()) for row in rows]


def run(count: int, poison: set[int], batch: int) -> tuple[set[int], set[int], int]:
    """A worker that dies whenever its rows hold a poison row. Returns (finished, condemned, deaths)."""
    ledger, pending = RetryLedger(), requests(range(count))
    finished: set[int] = set()
    condemned: set[int] = set()
    deaths = 0
    while pending or ledger.has_trial:
        assert not ledger.exhausted
        if ledger.has_trial:
            load = list(ledger.next_trial())
        else:
            load, pending = pending[:batch], pending[batch:]
        if poison & {r.row for r in load}:
            deaths += 1
            again, poisonous = ledger.died(load)
            pending = again + pending
            condemned |= {r.row for r in poisonous}
        else:
            for request in load:
                ledger.finished(request.row)
                finished.add(request.row)
    return finished, condemned, deaths


@given(st.data())
def test_poison_rows_are_isolated_and_the_others_finish(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 80))
    batch = data.draw(st.integers(1, 32))
    poison = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    finished, condemned, deaths = run(count, poison, batch)
    assert condemned == poison
    assert finished == set(range(count)) - poison
    assert deaths <= len(poison) * (4 + math.ceil(math.log2(batch)))


def test_one_death_alone_condemns_nobody() -> None:
    ledger = RetryLedger()
    again, poison = ledger.died(requests(range(1)))
    assert [r.row for r in again] == [0]
    assert not poison
    assert not ledger.has_trial


def test_deaths_without_a_finished_row_exhaust_the_ledger() -> None:
    ledger = RetryLedger()
    for _ in range(MAX_FRUITLESS_DEATHS):
        ledger.died([])
    assert not ledger.exhausted
    ledger.died([])
    assert ledger.exhausted
    ledger.finished(7)
    assert not ledger.exhausted
