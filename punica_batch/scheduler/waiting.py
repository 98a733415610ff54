"""The sequences that hold no blocks yet, by arrival and by adapter."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, KeysView

from punica_batch.scheduler.sequence import Sequence


class WaitingQueue:
    """One queue an adapter, each in order of arrival, so that skipping an adapter skips all its rows at once."""

    def __init__(self) -> None:
        self._queues: dict[str | None, deque[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, adapter by adapter."""
        for queue in self._queues.values():
            yield from queue

    @property
    def adapters(self) -> KeysView[str | None]:
        """Those that any wait for, as they are at any time."""
        return self._queues.keys()

    def add(self, sequence: Sequence) -> None:
        """New ones go to the end, a preempted one to the front of its adapter's: its rows start in order and the
        newest is preempted first, so all that wait are newer."""
        queue = self._queues.setdefault(sequence.lora_id, deque())
        if sequence.started:
            assert not queue or sequence.arrival < queue[0].arrival
            queue.appendleft(sequence)
        else:
            queue.append(sequence)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.lora_id]
        if queue[0] is sequence:
            queue.popleft()
        else:
            queue.remove(sequence)
        if not queue:
            del self._queues[sequence.lora_id]
        self._count -= 1

    def heads(self) -> Heads:
        return Heads(self._queues)


class Heads:
    """One scan in order of arrival that can leave out an adapter. The caller removes the head from the queue before
    it calls ``advance`` and changes nothing else meanwhile."""

    def __init__(self, queues: dict[str | None, deque[Sequence]]) -> None:
        self._queues = queues
        self._heap = [(queue[0].arrival, lora_id) for lora_id, queue in queues.items()]
        heapq.heapify(self._heap)  # arrivals differ, so adapters are never compared

    def peek(self) -> Sequence | None:
        """The oldest sequence of the adapters still in the scan."""
        return self._queues[self._heap[0][1]][0] if self._heap else None

    def skip_adapter(self) -> None:
        """Leaves out the rest of the current head's adapter."""
        heapq.heappop(self._heap)

    def advance(self) -> None:
        """Goes on after the current head was taken out of the queue."""
        lora_id = self._heap[0][1]
        queue = self._queues.get(lora_id)
        if queue:
            heapq.heapreplace(self._heap, (queue[0].arrival, lora_id))
        else:
            heapq.heappop(self._heap)
