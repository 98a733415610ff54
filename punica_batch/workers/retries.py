"""Which rows to try again, and how, after a worker died with them.

A death may be the machine's fault (memory, a signal) or one row's. Every row gets one more try among others. Rows
that were there at a second death are suspects: they run as *trials*, alone on a worker, and each further death halves
the trial, until one row has killed a worker that had nothing else to do. That row becomes an error row. A batch of n
rows with one poison row costs 2 + log2(n) deaths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from punica_batch.types import Request

# Deaths in a row without one finished row between them; more than any bisection of a 1,024-row backlog needs.
MAX_FRUITLESS_DEATHS = 24


class RetryLedger:
    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}
        self._trials: deque[tuple[Request, ...]] = deque()
        self.fruitless_deaths = 0

    def died(self, requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """``requests`` were on a worker that died. Returns (to run again as usual, poison); the rest became trials."""
        self.fruitless_deaths += 1
        again: list[Request] = []
        suspects: list[Request] = []
        for request in requests:
            deaths = self._deaths[request.row] = self._deaths.get(request.row, 0) + 1
            (again if deaths == 1 else suspects).append(request)
        if len(requests) == 1 and suspects:
            return [], suspects
        half = (len(suspects) + 1) // 2
        self._trials += [tuple(part) for part in (suspects[:half], suspects[half:]) if part]
        return again, []

    def finished(self, row: int) -> None:
        self.fruitless_deaths = 0
        self._deaths.pop(row, None)

    @property
    def has_trial(self) -> bool:
        return bool(self._trials)

    def next_trial(self) -> tuple[Request, ...]:
        return self._trials.popleft()

    @property
    def exhausted(self) -> bool:
        return self.fruitless_deaths > MAX_FRUITLESS_DEATHS
