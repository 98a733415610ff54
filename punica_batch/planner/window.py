"""The rows that were read and have not finished, grouped so that scattered adapters still meet.

Rows may run in any order inside the window. What the parent's memory holds is bounded in rows and in bytes; what the
journal may have to hold out of order is bounded by the window's *span*: the rows from the oldest unfinished one to the
newest one read. The span is wider, so that adapters whose first rows lie close together (as at the start of every job)
do not all have to have had their turn before the window moves on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_MAX_ROWS = 65_536
DEFAULT_MAX_BYTES = 256 * 2**20
SPAN_FACTOR = 3  # a round of all adapters takes twice the rows that are held, the first one a little more


@dataclass(frozen=True, slots=True)
class PendingRow:
    """One row that waits for a worker. ``nbytes``: what it keeps in the parent's memory until it has finished;
    ``payload``: whatever the caller needs to send it."""

    row: int
    lora_id: str | None
    prompt_tokens: int
    nbytes: int
    payload: object = None

    @property
    def length_bucket(self) -> int:
        return self.prompt_tokens.bit_length()


class _AdapterRows:
    """One adapter's pending rows: a heap of row numbers for each length bucket."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[int]] = {}

    def add(self, row: PendingRow) -> None:
        heapq.heappush(self._buckets.setdefault(row.length_bucket, []), row.row)

    @property
    def oldest(self) -> int | None:
        return min((heap[0] for heap in self._buckets.values()), default=None)

    def take(self, max_rows: int) -> list[int]:
        """The oldest row, then the others: longer buckets first, the oldest first in each."""
        first = min(self._buckets, key=lambda bucket: self._buckets[bucket][0])
        taken = [self._pop(first)]
        while self._buckets and len(taken) < max_rows:
            taken.append(self._pop(max(self._buckets)))
        return taken

    def _pop(self, bucket: int) -> int:
        row = heapq.heappop(self._buckets[bucket])
        if not self._buckets[bucket]:
            del self._buckets[bucket]
        return row


class Window:
    """Rows go ``add`` → ``next_group`` (→ ``give_back`` → ``next_group``) → ``mark_finished``.

    Each worker has a *turn*: the adapter whose rows it gets until none of them is pending. Places fall free a few at a
    time; were they given to the oldest rows each time, groups would be as small, and a batch would hold as many
    adapters as rows. No row waits for ever: once the window is full of younger ones, none are added and turns end.

    ``first_row`` is the first row that is not known to be finished: the low-water mark begins there. Rows may be added
    in any order. Every operation costs O(log rows) a row. Misuse (a row added twice, finished while pending, given
    back without being in flight) raises ``ValueError``.
    """

    def __init__(
        self, max_rows: int = DEFAULT_MAX_ROWS, max_bytes: int = DEFAULT_MAX_BYTES, *, first_row: int = 0
    ) -> None:
        self.max_rows = max_rows
        self.max_span = SPAN_FACTOR * max_rows
        self.max_bytes = max_bytes
        self._low_water = first_row  # all rows before it have finished
        self._next_row = first_row
        self._finished: set[int] = set()  # above the low-water mark
        self._unfinished: dict[int, PendingRow] = {}
        self._in_flight: set[int] = set()
        self._by_adapter: dict[str | None, _AdapterRows] = {}
        self._oldest: list[tuple[int, str | None]] = []  # heap; an entry is stale unless it is its adapter's oldest
        self._turns: dict[str, str | None] = {}  # worker → adapter
        self._bytes = 0

    @property
    def span(self) -> int:
        """Rows from the oldest unfinished one to the newest one seen."""
        return self._next_row - self._low_water

    @property
    def nbytes(self) -> int:
        """Bytes kept for rows that have not finished."""
        return self._bytes

    @property
    def num_pending(self) -> int:
        return len(self._unfinished) - len(self._in_flight)

    def can_read(self, stop: int | None = None) -> bool:
        """Whether the rows before ``stop`` may be read (default: one more than seen so far). Rows and bytes held may
        go over by what is being read, since they are known only afterwards; the span does not."""
        stop = self._next_row + 1 if stop is None else stop
        has_room = len(self._unfinished) < self.max_rows and self._bytes < self.max_bytes
        return has_room and stop - self._low_water <= self.max_span

    def add(self, row: PendingRow) -> None:
        if row.row in self._unfinished or row.row in self._finished or row.row < self._low_water:
            raise ValueError(f"row {row.row} is in the window already or has finished")
        self._unfinished[row.row] = row
        self._bytes += row.nbytes
        self._next_row = max(self._next_row, row.row + 1)
        self._make_pending(row)

    def peek(self) -> PendingRow | None:
        """The oldest pending row."""
        while self._oldest:
            row, lora_id = self._oldest[0]
            rows = self._by_adapter.get(lora_id)
            if rows is not None and rows.oldest == row:
                return self._unfinished[row]
            heapq.heappop(self._oldest)
        return None

    def next_group(self, max_rows: int, worker: str) -> list[PendingRow]:
        """Takes up to ``max_rows`` (at least 1) rows of one adapter for ``worker``: of its turn's, or else of the one
        that has the oldest pending row of those whose turn it is at no other worker (or, for want of such, of all).
        That adapter's oldest row first, then longer prompts before shorter ones (by powers of two), oldest first.
        Empty when nothing is pending."""
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {max_rows}")
        if not self._by_adapter:
            return []
        turn = self._turns.get(worker)
        if worker not in self._turns or turn not in self._by_adapter:
            turn = self._turns[worker] = self._next_turn(worker)
        rows = self._by_adapter[turn]
        taken = rows.take(max_rows)
        if (oldest := rows.oldest) is None:
            del self._by_adapter[turn]
        else:
            heapq.heappush(self._oldest, (oldest, turn))
        self._in_flight.update(taken)
        return [self._unfinished[row] for row in taken]

    def _next_turn(self, worker: str) -> str | None:
        """The adapter of the oldest pending row, those of other workers' turns left out if there is another."""
        taken = {lora_id for name, lora_id in self._turns.items() if name != worker}
        passed = []
        while (head := self.peek()) is not None and head.lora_id in taken:
            passed.append(heapq.heappop(self._oldest))
        for entry in passed:
            heapq.heappush(self._oldest, entry)
        head = head or self.peek()
        assert head is not None
        return head.lora_id

    def give_back(self, rows: Iterable[int]) -> None:
        """Rows in flight that were not run (their worker died, or they were stolen) are pending again."""
        for row in rows:
            if row not in self._in_flight:
                raise ValueError(f"row {row} is not in flight")
            self._in_flight.remove(row)
            self._make_pending(self._unfinished[row])

    def mark_finished(self, row: int) -> None:
        """The row's result is kept elsewhere now. A row that never was added (it failed before) counts too; one that
        has finished before is ignored."""
        if row < self._low_water or row in self._finished:
            return
        if row in self._unfinished:
            if row not in self._in_flight:
                raise ValueError(f"row {row} is pending and cannot have finished")
            self._in_flight.remove(row)
            self._bytes -= self._unfinished.pop(row).nbytes
        self._next_row = max(self._next_row, row + 1)
        self._finished.add(row)
        while self._low_water in self._finished:
            self._finished.remove(self._low_water)
            self._low_water += 1

    def _make_pending(self, row: PendingRow) -> None:
        rows = self._by_adapter.setdefault(row.lora_id, _AdapterRows())
        rows.add(row)
        if rows.oldest == row.row:
            heapq.heappush(self._oldest, (row.row, row.lora_id))
