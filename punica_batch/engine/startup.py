"""What an engine's start has to tell: where its seconds go, and what is not as it was asked for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# How long a thread that wants the interpreter lets another one have it, seconds. A load has to get it back some five
# times, and at Python's 5 ms there are 200 turns a second for all threads together. Measured with 12 of them beside a
# busy engine thread: 41 adapters/s of 80 MB, each at 5.4 ms of that thread; at 0.5 ms 107 adapters/s, at 2.4 ms each.
_SWITCH_SECONDS = 0.0005


class EngineWarning(UserWarning):
    """One sentence for the user: the engine runs, but slower or smaller than it might."""


class StartupTimes:
    """Seconds by stage. Stages may run side by side on several threads, so that they add up to more than the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the block's time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())


def share_interpreter() -> None:
    """Lets threads that load beside a GPU's engine have the interpreter soon. It holds for the whole process, so it is
    for those that are the engine's own to call: a worker, a benchmark."""
    sys.setswitchinterval(_SWITCH_SECONDS)
