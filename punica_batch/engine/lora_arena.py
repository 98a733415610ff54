"""The bytes of the device that adapters may hold: handed out and taken back without asking the device's allocator.

One reservation, made before the KV cache takes the rest: no adapter can then run out of memory in mid-job, and none
waits for an allocation, which would wait for the device.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from typing import Protocol


class Event(Protocol):
    """Something enqueued on the device: over, or to be waited for."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class NoRoom(Exception):
    """``nbytes`` are not free in one piece; adapters have to go first."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Arena:
    """Intervals of [0, ``size``), best fit. For use by several threads.

    What is freed ``after`` an event may be used again once that event is over. Room may be reserved under a name: then
    it is what others may not reserve, until that name allocates or ``cancel`` is called.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = _Intervals(size)
        self._pending: deque[tuple[Event, int, int]] = deque()
        self._reserved: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int) -> bool:
        """Whether ``nbytes`` beside all that others have reserved will be free once all that is being freed is. They
        need not be in one piece: ``allocate`` may still raise ``NoRoom``."""
        with self._lock:
            if nbytes + self._others(name) > self._free.total + self._pending_bytes():
                return False
            self._reserved[name] = nbytes
            return True

    def lack(self, name: str, nbytes: int) -> int:
        """How many bytes more would have to be freed for ``reserve`` to answer yes; 0 and less for none."""
        with self._lock:
            return self._others(name) + nbytes - self._free.total - self._pending_bytes()

    def cancel(self, name: str) -> None:
        """What ``name`` has reserved, if anything, is free again."""
        with self._lock:
            self._reserved.pop(name, None)

    def allocate(self, nbytes: int, name: str) -> int:
        """Where ``nbytes`` lie. Waits for what is being freed if need be; raises ``NoRoom`` if that is not enough."""
        while True:
            with self._lock:
                self._collect()
                start = self._free.take(nbytes)
                if start is not None or not self._pending:
                    self._reserved.pop(name, None)  # not before: others would take what is waited for
                    if start is None:
                        raise NoRoom(nbytes)
                    return start
                event = self._pending[0][0]
            event.synchronize()

    def free(self, start: int, nbytes: int, after: Event | None = None) -> None:
        with self._lock:
            if after is None:
                self._free.give(start, start + nbytes)
            else:
                self._pending.append((after, start, start + nbytes))

    @property
    def free_bytes(self) -> int:
        """What is being freed included."""
        with self._lock:
            return self._free.total + self._pending_bytes()

    def _others(self, name: str) -> int:
        return sum(reserved for other, reserved in self._reserved.items() if other != name)

    def _pending_bytes(self) -> int:
        return sum(stop - start for _, start, stop in self._pending)

    def _collect(self) -> None:
        """Events are of one stream: the first that is not over ends the search."""
        while self._pending and self._pending[0][0].query():
            _, start, stop = self._pending.popleft()
            self._free.give(start, stop)


class _Intervals:
    """Disjoint free intervals that do not touch, in order."""

    def __init__(self, size: int) -> None:
        self._starts, self._stops = [0], [size]
        self.total = size

    def take(self, nbytes: int) -> int | None:
        """The start of a piece of the smallest interval that is long enough."""
        lengths = [stop - start for start, stop in zip(self._starts, self._stops, strict=True)]
        i = min((i for i, n in enumerate(lengths) if n >= nbytes), key=lengths.__getitem__, default=None)
        if i is None:
            return None
        start = self._starts[i]
        if lengths[i] == nbytes:
            del self._starts[i], self._stops[i]
        else:
            self._starts[i] += nbytes
        self.total -= nbytes
        return start

    def give(self, start: int, stop: int) -> None:
        if stop == start:
            return
        self.total += stop - start
        i = bisect_left(self._starts, start)
        assert i == 0 or self._stops[i - 1] <= start
        assert i == len(self._starts) or stop <= self._starts[i]
        if i < len(self._starts) and self._starts[i] == stop:
            stop = self._stops[i]
            del self._starts[i], self._stops[i]
        if i > 0 and self._stops[i - 1] == start:
            self._stops[i - 1] = stop
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)
