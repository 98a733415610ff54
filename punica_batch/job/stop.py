"""When a run must stop early: signals and ``--max-runtime``."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Watches for SIGINT, SIGTERM and the time limit while it is entered.

    The first signal asks the run to stop by itself; a second ends the process at once with 128 + its number, and the
    workers with it. Outside the main thread only the time limit is watched.
    """

    def __init__(self, max_runtime: float | None) -> None:
        self._deadline = None if max_runtime is None else time.monotonic() + max_runtime
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._on_signal) for s in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)
        self._signal = signal.Signals(number)

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self._signal is not None:
            return self._signal.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "--max-runtime"
        return None
