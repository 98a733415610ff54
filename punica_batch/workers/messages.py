"""What parent and workers say to each other: plain data over an inherited socket pair.

Parent → engine worker: ``StartEngine``, then any number of ``Submit`` / ``TakeBack``.
Engine worker → parent: ``Ready`` once, then ``Finished`` / ``Returned`` / ``Heartbeat``; ``Fatal`` before it gives up.
Parent → text worker: ``StartText``, then ``Chunk``; text worker → parent: ``Ready``, ``PreparedChunk``.
Parent → prebuild process: ``StartPrebuild``; it answers with ``KernelBuild``s, then None or the ``PunicaError``.

Every message from a worker carries the ``epoch`` of its incarnation; the parent drops those of an earlier one.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from punica_batch.types import Request, RowResult, WorkerStats


@dataclass(frozen=True, slots=True)
class StartEngine:
    settings: Any  # engine.settings.EngineSettings
    epoch: int
    num_threads: int | None


@dataclass(frozen=True, slots=True)
class StartText:
    settings: Any  # text.prepare.TextSettings
    epoch: int


@dataclass(frozen=True, slots=True)
class StartPrebuild:
    """Build the kernels that an engine of ``settings`` uses for adapters of ``ranks`` on the modules ``targets``."""

    settings: Any  # engine.settings.EngineSettings
    ranks: tuple[int, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Give back up to ``count`` rows that have not started, newest first."""

    count: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``first_row ...`` as one Arrow IPC stream."""

    chunk: int
    first_row: int
    ipc: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's true capacity. ``notes``: sentences for the user. ``startup``: seconds of the start by stage; some run
    side by side."""

    epoch: int
    max_num_seqs: int = 0
    num_blocks: int = 0
    block_size: int = 1
    notes: tuple[str, ...] = ()
    startup: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    epoch: int
    results: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    epoch: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    epoch: int
    stats: WorkerStats


@dataclass(frozen=True, slots=True)
class PreparedChunk:
    epoch: int
    chunk: int
    requests: tuple[Request, ...]
    errors: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True)
class Fatal:
    """The worker cannot go on. ``error`` is the exception itself when it is one of ours, else a line."""

    epoch: int
    error: Exception


class Channel:
    """One end of a socket pair that carries whole messages.

    Pickle is safe here: both ends are our own processes, and the socket has no name that another could open.
    """

    def __init__(self, fd: int) -> None:
        self.connection: Connection[Any, Any] = Connection(fd)  # for ``multiprocessing.connection.wait``

    @classmethod
    def pair(cls) -> tuple[Channel, int]:
        """(the parent's end, the file descriptor that the child inherits)"""
        ours, theirs = socket.socketpair()
        return cls(ours.detach()), theirs.detach()

    def send(self, message: object) -> None:
        """Raises ``OSError`` when the other end is gone."""
        self.connection.send_bytes(pickle.dumps(message, protocol=5))

    def receive(self) -> Any:
        """The next message; blocks. Raises ``EOFError`` or ``OSError`` when the other end is gone."""
        return pickle.loads(self.connection.recv_bytes())

    def has_message(self) -> bool:
        """True also at the end of the stream, so that ``receive`` finds it."""
        return self.connection.poll(0)

    def close(self) -> None:
        self.connection.close()
