"""Cores for GPU workers: near their GPU, never shared while there are enough, whatever the machine looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from punica_batch.workers.affinity import (
    allowed_cores,
    parse_cpu_list,
    physical_cores,
    running_on,
    share_cores,
)

AFFINITY = "import os; print(sorted(os.sched_getaffinity(0)))"
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system cannot bind processes")


def cpus(*ranges: str) -> frozenset[int]:
    return parse_cpu_list(",".join(ranges))


def test_two_sockets_with_hyperthreads() -> None:
    """8 GPUs on 2 sockets of 16 cores; CPU i + 32 is the other thread of CPU i. No physical core has two workers."""
    core_of = {i: i % 32 for i in range(64)}
    near = [cpus("0-15,32-47")] * 4 + [cpus("16-31,48-63")] * 4
    shares = share_cores(near, cpus("0-63"), core_of)
    assert shares[0] == cpus("0-3,32-35")
    assert shares[3] == cpus("12-15,44-47")
    assert shares[4] == cpus("16-19,48-51")
    assert frozenset().union(*shares) == cpus("0-63")
    assert sum(map(len, shares)) == 64


def test_gpus_in_any_order_of_nodes() -> None:
    near = [cpus("8-15"), cpus("0-7"), cpus("8-15")]
    assert share_cores(near, cpus("0-15"), {}) == [cpus("8-11"), cpus("0-7"), cpus("12-15")]


def test_a_machine_that_does_not_tell_is_shared_evenly() -> None:
    assert share_cores([frozenset()] * 3, cpus("0-7"), {}) == [cpus("0-1"), cpus("2-4"), cpus("5-7")]


def test_only_what_the_process_may_use() -> None:
    """Of a node where it may use nothing it takes what it may."""
    near = [cpus("0-7"), cpus("8-15")]
    assert share_cores(near, cpus("2-5"), {}) == [cpus("2-3"), cpus("4-5")]
    assert share_cores(near, cpus("6-9"), {}) == [cpus("6-7"), cpus("8-9")]


def test_fewer_cores_than_gpus() -> None:
    assert share_cores([cpus("0-1")] * 4, cpus("0-1"), {}) == [cpus("0-1")] * 4
    assert share_cores([cpus("0-3")] * 4, cpus("0-3"), {0: 0, 1: 0, 2: 2, 3: 2}) == [cpus("0-3")] * 4


def test_sets_that_overlap_share_what_all_of_them_have() -> None:
    """Two nodes of 8: GPUs of which the system says nothing take first what no other could have."""
    first, second = cpus("0-7"), cpus("8-15")
    assert share_cores([first, frozenset()], cpus("0-15"), {}) == [first, second]
    assert share_cores([first, first, frozenset()], cpus("0-15"), {}) == [cpus("0-3"), cpus("4-7"), second]
    shares = share_cores([first, second, frozenset()], cpus("0-15"), {})
    assert sorted(map(len, shares)) == [5, 5, 6]
    assert frozenset().union(*shares) == cpus("0-15")
    # the second has nothing but what the first could have too
    assert share_cores([cpus("0-5"), cpus("4-5")], cpus("0-5"), {}) == [cpus("0-3"), cpus("4-5")]
    threads = {i: i % 8 for i in range(16)}
    assert share_cores([cpus("0-3,8-11"), cpus("2-7,10-15")], cpus("0-15"), threads) == [
        cpus("0-3,8-11"), cpus("4-7,12-15")
    ]  # fmt: skip


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6))
def test_of_nodes_and_the_unknown_nobody_gets_less_than_need_be(first: int, second: int, where: list[int]) -> None:
    """The least share is the best there is: for any workers together, their cores over their number."""
    nodes = [frozenset(range(first)), frozenset(range(first, first + second)), frozenset[int]()]
    allowed = nodes[0] | nodes[1]
    near = [nodes[i] for i in where]
    usable = [cores or allowed for cores in near]
    groups = [g for n in range(1, len(near) + 1) for g in combinations(usable, n)]
    best = min(len(frozenset().union(*group)) // len(group) for group in groups)
    shares = share_cores(near, allowed, {})
    if best:
        assert sum(map(len, shares)) == len(frozenset().union(*shares)) == len(frozenset().union(*usable))
        assert min(map(len, shares)) == best
    else:
        assert frozenset().union(*shares) == frozenset().union(*usable)


def test_a_system_without_affinity() -> None:
    assert share_cores([frozenset(), frozenset()], frozenset(), {}) == [frozenset(), frozenset()]


@given(
    st.lists(st.frozensets(st.integers(0, 30)), min_size=1, max_size=9), st.frozensets(st.integers(0, 30), min_size=1)
)
def test_every_worker_gets_cores_that_it_may_use(near: list[frozenset[int]], allowed: frozenset[int]) -> None:
    shares = share_cores(near, allowed, {i: i // 2 for i in range(31)})
    assert len(shares) == len(near)
    for i, (share, wanted) in enumerate(zip(shares, near, strict=True)):
        assert share
        assert share <= (wanted & allowed or allowed)
        for other, its in zip(shares[:i], near[:i], strict=True):
            if (its & allowed or allowed) == (wanted & allowed or allowed):
                assert other == share or not other & share


@pytest.mark.parametrize(("text", "expected"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("\n", set())])
def test_cpu_lists(text: str, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


def test_physical_cores_from_the_system(tmp_path: Path) -> None:
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4"), (5, "nonsense")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores(frozenset({0, 1, 4, 5, 9}), tmp_path) == {0: 0, 1: 1, 4: 0}


@needs_affinity
def test_a_child_starts_on_its_cores_and_this_thread_is_as_before() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({max(before)})
    assert allowed_cores() == before
    with running_on(one):
        child = subprocess.run([sys.executable, "-c", AFFINITY], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(sorted(one))
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_cores_that_are_not_there_are_no_error() -> None:
    before = os.sched_getaffinity(0)
    with running_on(frozenset({100_000})), running_on(frozenset()):
        assert os.sched_getaffinity(0) == before
    with pytest.raises(KeyError), running_on(frozenset({max(before)})):
        raise KeyError
    assert os.sched_getaffinity(0) == before
