"""Builds a job's kernels in a process of its own, in a worker's environment: the parent never imports torch."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from punica_batch.engine.kernel_cache import KernelBuild
from punica_batch.errors import JobError, PunicaError
from punica_batch.workers.child import open_channel
from punica_batch.workers.devices import Device
from punica_batch.workers.messages import StartPrebuild
from punica_batch.workers.process import ChildProcess


def build_kernels(settings: Any, device: Device, ranks: Sequence[int], targets: Sequence[str]) -> Iterator[KernelBuild]:
    """What ``engine.prebuild.prebuild`` tells, as it goes. Raises its ``PunicaError``, or ``JobError`` when the process
    dies."""
    process = ChildProcess("punica_batch.workers.prebuild", device.env)  # on all cores: compilers are at work
    try:
        process.send(StartPrebuild(settings, tuple(ranks), tuple(targets)))
        while True:
            wait([process.channel.connection])
            messages, is_alive = process.receive_all()
            for message in messages:
                if message is None:
                    return
                if isinstance(message, PunicaError):
                    raise message
                yield message
            if not is_alive:
                raise JobError(f"building the kernels failed ({process.cause_of_death()})")
    finally:
        process.kill()
        process.close()


def main() -> None:
    channel = open_channel()
    start = channel.receive()
    assert isinstance(start, StartPrebuild)
    from punica_batch.engine.prebuild import prebuild

    try:
        for build in prebuild(start.settings, start.ranks, start.targets):
            channel.send(build)
        channel.send(None)
    except PunicaError as error:
        channel.send(error)
    except Exception as error:
        traceback.print_exception(error)
        print(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
