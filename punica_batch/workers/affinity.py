"""Which cores each GPU's worker runs on: those near its GPU, shared out among the GPUs that they are near to."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Cores = frozenset[int]


def share_cores(near: Sequence[Cores], allowed: Cores, core_of: Mapping[int, int]) -> list[Cores]:
    """The logical CPUs for each of the workers, in their order.

    ``near``: those of the NUMA node of each worker's GPU, empty where the system does not say; ``allowed``: those that
    this process may use; ``core_of``: logical CPU → its physical core (missing: one of its own), so that two workers
    never share one. GPUs that have the same CPUs share them evenly, and where the CPUs of some are also others' (as
    where the system says it of a few only), each gets as even a part of them all as can be. Where there are too few
    for one to get any, it and those that it competes with get all of theirs.
    """
    usable = [cpus & allowed or allowed for cpus in near]
    cores = [{core_of.get(cpu, cpu) for cpu in cpus} for cpus in usable]
    mine = _divide(cores)
    starved = [its for its, got in zip(cores, mine, strict=True) if not got]
    return [
        cpus if any(its & others for others in starved) else frozenset(c for c in cpus if core_of.get(c, c) in got)
        for cpus, its, got in zip(usable, cores, mine, strict=True)
    ]


def _divide(cores: Sequence[set[int]]) -> list[set[int]]:
    """Each worker's part of its ``cores``, no core twice, neighbours together.

    A *region* is the cores that the same workers could have. The worker that has the fewest takes the next core (of
    equals, the one with the least choice), from the region that has the most left for each of its workers: that spares
    what others need.
    """
    regions: dict[frozenset[int], list[int]] = {}
    for core in sorted(set[int]().union(*cores)):
        regions.setdefault(frozenset(i for i, its in enumerate(cores) if core in its), []).append(core)
    left = {workers: len(its) for workers, its in regions.items()}
    taken = [Counter[frozenset[int]]() for _ in cores]
    while left:
        poorest = min(frozenset[int]().union(*left), key=lambda i: (taken[i].total(), len(cores[i]), -i))
        region = max((workers for workers in left if poorest in workers), key=lambda r: left[r] / len(r))
        taken[poorest][region] += 1
        left[region] -= 1
        if not left[region]:
            del left[region]
    mine: list[set[int]] = []
    for counts in taken:
        mine.append(set())
        for region, count in counts.items():
            mine[-1].update(regions[region][:count])
            del regions[region][:count]
    return mine


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
