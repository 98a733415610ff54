"""The engine worker: ``python -m punica_batch.workers.worker FD``. One process, one engine, one device."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, NoReturn

from punica_batch.errors import PunicaError
from punica_batch.types import RowResult
from punica_batch.workers.child import Inbox, open_channel
from punica_batch.workers.messages import (
    Channel,
    Fatal,
    Finished,
    Heartbeat,
    Ready,
    Returned,
    StartEngine,
    Submit,
    TakeBack,
)

if TYPE_CHECKING:
    from punica_batch.engine.engine import Engine

HEARTBEAT_SECONDS = 0.25


def main() -> None:
    channel = open_channel()
    start = channel.receive()
    assert isinstance(start, StartEngine)
    try:
        engine, ready = _build(start)
    except PunicaError as error:
        channel.send(Fatal(start.epoch, error))
        return
    except BaseException as error:
        _die(error)
    channel.send(ready)
    try:
        _Worker(channel, engine, start.epoch).run()
    except PunicaError as error:  # such as StoreAway: no row's fault, so no death that its rows would be tried for
        channel.send(Fatal(start.epoch, error))
    except BaseException as error:
        _die(error)


def _die(error: BaseException) -> NoReturn:
    """Ends the process at once; its parent then tries the rows again in another. A CUDA context that has failed (or a
    thread that waits for it) could hang an orderly end, and all that the process holds is the kernel's to free."""
    traceback.print_exception(error)
    # the parent shows the last line: CUDA's own message ends with advice for its developers
    print(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}", file=sys.stderr, flush=True)
    os._exit(1)


def _build(start: StartEngine) -> tuple[Engine, Ready]:
    """The engine, and what it has room for: on a GPU that may be less than the settings ask for."""
    begin = time.perf_counter()
    import torch

    from punica_batch.engine.build import build_engine
    from punica_batch.engine.startup import EngineWarning, StartupTimes, share_interpreter

    times = StartupTimes()
    times.add("imports", time.perf_counter() - begin)
    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EngineWarning)
        engine = build_engine(start.settings, times)
    if start.settings.device != "cpu":
        share_interpreter()
    times.add("whole", time.perf_counter() - begin)
    notes = tuple(str(each.message) for each in caught if issubclass(each.category, EngineWarning))
    settings = engine.settings
    return engine, Ready(
        start.epoch, settings.max_num_seqs, settings.num_blocks, settings.block_size, notes, times.seconds
    )


class _Worker:
    def __init__(self, channel: Channel, engine: Engine, epoch: int) -> None:
        self._channel = channel
        self._engine = engine
        self._epoch = epoch
        self._inbox = Inbox(channel)
        self._next_heartbeat = 0.0

    def run(self) -> None:
        while True:
            for message in self._inbox.drain(block=not self._engine.has_work):
                self._handle(message)
            results = self._engine.step()
            self._report(results)

    def _handle(self, message: object) -> None:
        match message:
            case Submit(requests):
                for request in requests:
                    self._engine.add(request)
            case TakeBack(count):
                rows = tuple(request.row for request in self._engine.take_back(count))
                self._channel.send(Returned(self._epoch, rows))
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _report(self, results: list[RowResult]) -> None:
        if results:
            self._channel.send(Finished(self._epoch, tuple(results)))
        now = time.monotonic()
        if now >= self._next_heartbeat or not self._engine.has_work:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._channel.send(Heartbeat(self._epoch, self._engine.stats()))


if __name__ == "__main__":
    main()
