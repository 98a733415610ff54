"""Which rows to try again, and how, after a worker died with them.

A death may be the machine's fault (memory, a signal) or one row's. Every row gets one more try among others. Rows
that were there at a second death are suspects: they run as *trials*, alone on a worker, on another than the one that
died with them where there is one (it may be that GPU's fault), and each further death halves the trial, until one row
has killed a worker that had nothing else to do. That row becomes an error row. A batch of n rows with one poison row
costs 2 + log2(n) deaths, or one more.
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
        self._died_on: dict[int, str] = {}  # of each row's last death
        self._trials: deque[tuple[Request, ...]] = deque()
        self.fruitless_deaths = 0

    def died(
        self, requests: Sequence[Request], worker: str = "", *, has_others: bool = False
    ) -> tuple[list[Request], list[Request]]:
        """``requests`` were on ``worker``, which died; ``has_others``: a trial can be elsewhere. Returns (to run again
        as usual, poison); the rest became trials."""
        self.fruitless_deaths += 1
        again: list[Request] = []
        suspects: list[Request] = []
        is_elsewhere = any(self._died_on.get(request.row, worker) != worker for request in requests)
        for request in requests:
            deaths = self._deaths[request.row] = self._deaths.get(request.row, 0) + 1
            self._died_on[request.row] = worker
            (again if deaths == 1 else suspects).append(request)
        if len(requests) == 1 and suspects and (is_elsewhere or not has_others):
            return [], suspects
        half = (len(suspects) + 1) // 2
        self._trials += [tuple(part) for part in (suspects[:half], suspects[half:]) if part]
        return again, []

    def finished(self, row: int) -> None:
        self.fruitless_deaths = 0
        self._deaths.pop(row, None)
        self._died_on.pop(row, None)

    @property
    def has_trial(self) -> bool:
        return bool(self._trials)

    def next_trial(self, worker: str | None = None) -> tuple[Request, ...] | None:
        """The first one whose rows did not die on ``worker`` the last time (None: whichever is first), if any."""
        for i, trial in enumerate(self._trials):
            if worker is None or all(self._died_on[request.row] != worker for request in trial):
                del self._trials[i]
                return trial
        return None

    @property
    def exhausted(self) -> bool:
        return self.fruitless_deaths > MAX_FRUITLESS_DEATHS
