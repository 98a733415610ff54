"""Placement: the paper's rule against an exhaustive check, and the queue beyond a batch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_batch.planner.placement import Steal, WorkerView, place, place_backlog, release, steal


def worker(name: str, running: int = 0, backlog: int = 0, free: int = 100, cap: int = 8, **rows: int) -> WorkerView:
    return WorkerView(name, running, backlog, free, cap, dict(rows))


def test_the_largest_working_set_wins_over_all_else() -> None:
    workers = [worker("0", 5, free=50), worker("1", 4, free=1, a=4), worker("2", 5, free=50)]
    assert place(workers, "b", 1) == "2"
    assert place(workers, "a", 1) == "2"
    assert place(workers, "a", 1, pack="spread") == "1"


def test_ties_go_to_the_same_adapter_then_fewest_free_blocks_then_highest_name() -> None:
    workers = [
        worker("00", 3, free=5, a=1),
        worker("01", 3, free=9, a=2),
        worker("02", 3, free=7),
        worker("10", 3, free=5),
    ]
    assert place(workers, "a", 1) == "01"
    assert place(workers, "b", 1) == "10"
    assert place(workers[:3], "b", 1) == "00"
    assert place([worker("00", 2, free=1), worker("01", 2, free=5, a=2)], "a", 1, pack="spread") == "01"


def test_backlog_counts_as_working_set() -> None:
    assert place([worker("0", 3), worker("1", 1, 3)], None, 1) == "1"
    assert place([worker("0", 3), worker("1", 1, 7)], None, 1) == "0"


def test_none_when_all_are_full_lack_blocks_or_are_released() -> None:
    full = [worker("0", 8), worker("1", 5, 3), worker("2", 1, free=2), replace(worker("3"), active=False)]
    assert place(full, None, 3) is None
    assert place(full, None, 2) == "2"
    assert place([], None, 1) is None


def test_a_group_needs_places_for_all_its_rows() -> None:
    workers = [worker("0", 6), worker("1", 3)]
    assert place(workers, None, 1, rows=2) == "0"
    assert place(workers, None, 1, rows=3) == "1"
    assert place(workers, None, 1, rows=6) is None


def test_an_empty_worker_takes_a_row_with_more_samples_than_places() -> None:
    assert place([worker("0", 1), worker("1")], None, 1000, rows=20) == "1"
    assert place([worker("0", 1)], None, 1000, rows=20) is None


VIEWS = st.builds(
    WorkerView,
    name=st.integers(0, 99).map("{:02}".format),
    running=st.integers(0, 5),
    backlog=st.integers(0, 4),
    free_blocks=st.integers(0, 4),
    max_num_seqs=st.integers(1, 6),
    rows_by_adapter=st.dictionaries(st.sampled_from(["a", "b", None]), st.integers(0, 3)),
    active=st.booleans(),
)
FLEET = st.lists(VIEWS, max_size=6, unique_by=lambda view: view.name)


@settings(max_examples=300, deadline=None)
@given(FLEET, st.sampled_from(["a", "b", None]), st.integers(0, 4), st.integers(1, 3), st.booleans())
def test_place_against_a_pairwise_definition(
    fleet: list[WorkerView], lora_id: str | None, blocks: int, rows: int, busiest: bool
) -> None:
    """The chosen one loses no comparison, criterion by criterion, with any other that could take the rows."""

    def able(view: WorkerView) -> bool:
        size = view.running + view.backlog
        return view.active and (size == 0 or (size + rows <= view.max_num_seqs and blocks <= view.free_blocks))

    def beats(one: WorkerView, other: WorkerView) -> bool:
        sizes = one.running + one.backlog, other.running + other.backlog
        if sizes[0] != sizes[1]:
            return (sizes[0] > sizes[1]) is busiest
        same = one.rows_by_adapter.get(lora_id, 0), other.rows_by_adapter.get(lora_id, 0)
        if same[0] != same[1]:
            return same[0] > same[1]
        if one.free_blocks != other.free_blocks:
            return one.free_blocks < other.free_blocks
        return one.name > other.name

    chosen = place(fleet, lora_id, blocks, rows=rows, pack="busiest" if busiest else "spread")
    candidates = [view for view in fleet if able(view)]
    if chosen is None:
        assert not candidates
    else:
        best = next(view for view in candidates if view.name == chosen)
        assert all(beats(best, other) for other in candidates if other is not best)


def test_backlog_goes_to_the_shortest_then_the_same_adapter_within_the_lookahead() -> None:
    workers = [worker("0", 8, 3), worker("1", 8, 2), worker("2", 8, 2, a=5), replace(worker("3", 8), active=False)]
    assert place_backlog(workers, "a") == "2"
    assert place_backlog(workers, "b") == "2"  # the highest name
    assert place_backlog(workers, "b", rows=6) == "2"
    assert place_backlog(workers, "b", rows=7) is None  # more than one batch of 8
    assert place_backlog(workers, "b", lookahead=2) is None
    assert place_backlog([worker("0", 8, 8)], "b") is None
    assert place_backlog([], "b") is None


def test_steal_takes_only_what_exceeds_a_full_batch() -> None:
    thief, long, short = worker("0", 2), worker("1", 8, 9), worker("2", 8, 3)
    assert steal([thief, long, short]) == Steal("1", "0", 4)  # 12 in all, 8 a batch
    assert steal([thief, worker("1", 8, 8)]) is None
    assert steal([thief, worker("1", 8, 20)]) == Steal("1", "0", 6)  # its free places
    assert steal([worker("0", 8), long]) is None
    assert steal([replace(thief, active=False), long]) is None
    assert steal([worker("0", 2), worker("3", 5), worker("1", 8, 20)]) == Steal("1", "3", 3)  # the busiest steals
    assert steal([]) is None


def test_idle_workers_are_released_once_the_backlog_is_within_a_batch() -> None:
    assert release([worker("0"), worker("1", 8, 8)], pending=0) == ["0"]
    assert release([worker("0"), worker("1", 8, 9)], pending=0) == []
    assert release([worker("0"), worker("1", 8)], pending=1) == []
    assert release([replace(worker("0"), active=False), worker("1")], pending=0) == ["1"]
    assert release([worker("0", 1)], pending=0) == []


@settings(max_examples=200, deadline=None)
@given(FLEET)
def test_a_worker_is_never_told_to_steal_and_to_stop(fleet: list[WorkerView]) -> None:
    move = steal(fleet)
    if move is None:
        return
    by_name = {view.name: view for view in fleet}
    thief, victim = by_name[move.thief], by_name[move.victim]
    assert move.thief not in release(fleet, 0)
    assert thief is not victim
    assert 0 < move.count <= min(victim.backlog, thief.max_num_seqs - thief.running)
    assert victim.backlog == max(view.backlog for view in fleet if view.active)


@pytest.mark.parametrize("seed", range(5))
def test_a_job_of_groups_drains_through_few_workers_at_the_end(seed: int) -> None:
    """Rows placed, refilled, stolen and released until none is left: no batch runs empty while others queue."""
    chance = random.Random(seed)
    cap, names = 8, ["00", "01", "02", "03"]
    pending = [chance.choice("abcdef") for _ in range(400)]
    running: dict[str, list[str]] = {name: [] for name in names}
    backlog: dict[str, list[str]] = {name: [] for name in names}
    active = set(names)
    done = 0

    def views() -> list[WorkerView]:
        return [
            WorkerView(n, len(running[n]), len(backlog[n]), 100, cap, Counter(running[n] + backlog[n]), n in active)
            for n in names
        ]

    while done < 400:
        while pending and (name := place(views(), pending[0], 1) or place_backlog(views(), pending[0])):
            backlog[name].append(pending.pop(0))
        if not pending:
            while move := steal(views()):
                backlog[move.thief] += [backlog[move.victim].pop() for _ in range(move.count)]
                running[move.thief] += backlog[move.thief]
                backlog[move.thief].clear()
        for name in release(views(), len(pending)):
            active.remove(name)
        for name in names:
            while backlog[name] and len(running[name]) < cap:
                running[name].append(backlog[name].pop(0))
            assert name in active or not running[name]
            if pending:
                assert len(running[name]) == cap
            ended = [row for row in running[name] if chance.random() < 0.3]
            done += len(ended)
            for row in ended:
                running[name].remove(row)
    assert not any(running.values())
    assert not any(backlog.values())
    assert set(release(views(), 0)) == active
