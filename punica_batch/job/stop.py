"""When a run must stop early: signals and ``--max-runtime``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from punica_batch.errors import Interrupted, Signalled

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h\n"  # a live screen has hidden it, and cannot be asked to clean up


class StopRequest:
    """Watches for SIGINT, SIGTERM and the time limit while it is entered.

    The first signal ends what is entered with ``Interrupted`` wherever the run is, but for the time in which it looks
    at ``reason`` by itself (``polled``). A second one ends the process at once with 128 + its number, and the workers
    with it. Signals that the caller ignores (``nohup``, ``&``) stay ignored. Outside the main thread only the time
    limit is watched.
    """

    def __init__(self, max_runtime: float | None) -> None:
        self._deadline = None if max_runtime is None else time.monotonic() + max_runtime
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._is_polled = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            numbers = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
            self._previous = {n: signal.signal(n, self._on_signal) for n in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, Signalled):
            raise Interrupted(str(error)) from error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)
            os._exit(128 + number)
        self._signal = signal.Signals(number)
        if not self._is_polled:
            raise Signalled(self._signal.name)

    @contextmanager
    def polled(self) -> Iterator[None]:
        """For a loop that asks for ``reason`` often; a signal that it no longer saw raises at the end."""
        self._is_polled = True
        try:
            yield
        finally:
            self._is_polled = False
        if self._signal is not None:
            raise Signalled(self._signal.name)

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self._signal is not None:
            return self._signal.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "--max-runtime"
        return None
