"""What every child process does first: take its socket, never outlive its parent, leave signals to it."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from typing import Any

from punica_batch.workers.messages import Channel

_PR_SET_PDEATHSIG = 1


def open_channel() -> Channel:
    """The channel inherited as the descriptor named on the command line."""
    # The terminal's Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return Channel(int(sys.argv[1]))


class Inbox:
    """Messages from the parent, read by a thread of its own so that the parent's sends never block.

    When the parent is gone the process ends at once, whatever the main thread is doing: a worker that outlives its
    parent would hold the device.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                os._exit(0)
            self._queue.put(message)

    def wait(self) -> Any:
        return self._queue.get()

    def drain(self, *, block: bool) -> list[Any]:
        """All messages that are here; when ``block``, at least one."""
        messages = [self._queue.get()] if block else []
        while not self._queue.empty():
            messages.append(self._queue.get())
        return messages
