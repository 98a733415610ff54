"""Which cores each GPU's worker runs on: those near its GPU, shared out among the GPUs that they are near to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Cores = frozenset[int]


def share_cores(near: Sequence[Cores], allowed: Cores, core_of: Mapping[int, int]) -> list[Cores]:
    """The logical CPUs for each of the workers, in their order.

    ``near``: those of the NUMA node of each worker's GPU, empty where the system does not say; ``allowed``: those that
    this process may use; ``core_of``: logical CPU → its physical core (missing: one of its own), so that two workers
    never share one. GPUs that have the same CPUs share them evenly; where these are fewer than the GPUs, each gets all.
    """
    usable = [cpus & allowed or allowed for cpus in near]
    shares: list[Cores] = []
    for i, cpus in enumerate(usable):
        position, count = usable[:i].count(cpus), usable.count(cpus)
        shares.append(_share(cpus, position, count, core_of))
    return shares


def _share(cpus: Cores, position: int, count: int, core_of: Mapping[int, int]) -> Cores:
    cores = sorted({core_of.get(cpu, cpu) for cpu in cpus})
    if len(cores) < count:
        return cpus
    mine = set(cores[position * len(cores) // count : (position + 1) * len(cores) // count])
    return frozenset(cpu for cpu in cpus if core_of.get(cpu, cpu) in mine)


def allowed_cores() -> Cores:
    """The logical CPUs that this process may use; empty where the system has no such notion."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def physical_cores(cpus: Cores, root: Path = Path("/sys/devices/system/cpu")) -> dict[int, int]:
    """Logical CPU → the lowest-numbered one of its physical core, of those CPUs of which ``root`` tells."""
    found = {}
    for cpu in cpus:
        try:
            siblings = parse_cpu_list((root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            continue
        found[cpu] = min(siblings, default=cpu)
    return found


def parse_cpu_list(text: str) -> Cores:
    """The kernel's way to write CPUs, "0-3,8". Raises ``ValueError`` for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


@contextmanager
def running_on(cores: Cores) -> Iterator[None]:
    """What this thread starts meanwhile runs on ``cores``, from its first instruction on: a child inherits them, and
    with it the threads that its libraries start on import. Without effect where that cannot be (no such system call,
    cores that are not there)."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
