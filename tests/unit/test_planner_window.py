"""The window: grouping, bounds, and what they give for adapters scattered over a large input."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_batch.planner.window import PendingRow, Window


def row(number: int, lora_id: str | None = None, tokens: int = 10, nbytes: int = 1) -> PendingRow:
    return PendingRow(number, lora_id, tokens, nbytes, f"payload {number}")


def take(window: Window, max_rows: int = 100, worker: str = "0") -> list[int]:
    return [entry.row for entry in window.next_group(max_rows, worker)]


def test_a_group_is_all_of_the_oldest_rows_adapter() -> None:
    window = Window()
    for number, lora_id in enumerate(["a", "b", None, "a", "b", "a", None]):
        window.add(row(number, lora_id))
    peeked = window.peek()
    assert peeked is not None
    assert (peeked.row, peeked.payload) == (0, "payload 0")
    assert take(window) == [0, 3, 5]
    assert take(window) == [1, 4]
    assert take(window) == [2, 6]
    assert take(window) == []
    assert window.peek() is None
    assert (window.num_pending, window.nbytes) == (0, 7)  # in flight, and so held


def test_the_oldest_row_is_always_in_it_then_longer_prompts_first() -> None:
    window = Window()
    for number, tokens in enumerate([3, 100, 64, 20, 127, 2, 0]):
        window.add(row(number, "a", tokens))
    assert take(window, 4) == [0, 1, 2, 4]
    assert take(window, 2) == [3, 5]
    assert take(window, 2) == [6]


def test_a_worker_gets_one_adapters_rows_until_none_is_pending() -> None:
    window = Window()
    for number, lora_id in enumerate(["a", "a", None, "a", None]):
        window.add(row(number, lora_id))
    assert take(window, 1) == [0]
    assert take(window, 1) == [1]
    window.add(row(5, "a"))
    assert take(window, 1) == [3]
    assert take(window, 5) == [5]
    window.add(row(6, "b"))
    assert take(window, 1) == [2]
    window.add(row(7, "a"))
    assert take(window, 5) == [4]
    assert take(window, 5) == [6]
    assert take(window, 5) == [7]


def test_workers_take_turns_with_different_adapters_while_there_are_enough() -> None:
    window = Window()
    for number, lora_id in enumerate(["a", "a", "a", None, None, "b"]):
        window.add(row(number, lora_id))
    assert take(window, 1, "0") == [0]
    assert take(window, 1, "1") == [3]
    assert take(window, 1, "0") == [1]
    assert take(window, 5, "1") == [4]
    assert take(window, 5, "1") == [5]
    assert take(window, 5, "1") == [2]
    window.give_back([1, 3])
    assert take(window, 5, "0") == [1]
    assert take(window, 5, "0") == [3]


def test_rows_given_back_are_the_oldest_again() -> None:
    window = Window()
    for number, lora_id in enumerate(["a", "b", "a", "b"]):
        window.add(row(number, lora_id))
    assert take(window) == [0, 2]
    window.mark_finished(0)
    assert take(window) == [1, 3]
    window.give_back([2])
    window.give_back([3, 1])
    oldest = window.peek()
    assert oldest is not None
    assert oldest.row == 1
    assert take(window, 1) == [1]
    assert take(window) == [3]
    assert take(window) == [2]


def test_span_counts_from_the_oldest_unfinished_to_the_newest() -> None:
    window = Window(max_rows=4, first_row=10)
    assert window.can_read()
    assert window.can_read(10 + window.max_span)
    assert not window.can_read(11 + window.max_span)
    for number in (10, 11, 13):
        window.add(row(number))
    assert window.span == 4
    assert take(window) == [10, 11, 13]
    window.mark_finished(11)
    window.mark_finished(13)
    assert window.span == 4
    window.mark_finished(10)
    assert window.span == 2  # row 12 has been read, but is not here yet
    window.mark_finished(12)  # it failed before it could be added
    assert window.span == 0
    assert window.can_read(14 + window.max_span)
    assert not window.can_read(15 + window.max_span)


def test_rows_are_held_until_they_have_finished() -> None:
    window = Window(max_rows=2)
    window.add(row(0))
    assert window.can_read(2)
    window.add(row(1))
    assert not window.can_read(3)
    take(window)
    assert not window.can_read(3)
    window.mark_finished(1)
    assert window.can_read(3)


def test_bytes_are_held_until_a_row_has_finished() -> None:
    window = Window(max_bytes=100)
    window.add(row(0, nbytes=60))
    assert window.can_read()
    window.add(row(1, nbytes=60))
    assert window.nbytes == 120
    assert not window.can_read()
    take(window)
    assert not window.can_read()
    window.mark_finished(1)
    assert window.nbytes == 60
    assert window.can_read()


def test_misuse_is_refused() -> None:
    window = Window()
    window.add(row(0))
    window.add(row(1))
    with pytest.raises(ValueError, match="row 0 is in the window already"):
        window.add(row(0))
    with pytest.raises(ValueError, match="row 0 is pending"):
        window.mark_finished(0)
    with pytest.raises(ValueError, match="row 1 is not in flight"):
        window.give_back([1])
    with pytest.raises(ValueError, match="max_rows"):
        window.next_group(0, "0")
    take(window)
    window.mark_finished(0)
    window.mark_finished(0)
    with pytest.raises(ValueError, match="row 0 is in the window already or has finished"):
        window.add(row(0))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 12))
def test_against_a_naive_window(seed: int, adapters: int, max_rows: int) -> None:
    """Random adds (out of order), groups, returns and finishes; a list searched from the front is the oracle."""
    chance = random.Random(seed)
    window = Window(max_rows=20)
    incoming = [row(n, chance.choice([None, "a", "b", "c", "d"][:adapters]), chance.randint(0, 40)) for n in range(60)]
    pending: list[PendingRow] = []
    flying: list[PendingRow] = []
    finished: set[int] = set()
    newest = -1
    turns: dict[str, str | None] = {}
    while len(finished) < 60:
        low = next(n for n in range(61) if n not in finished)
        assert window.span == max(newest + 1, low) - low
        assert (window.num_pending, window.nbytes) == (len(pending), len(pending) + len(flying))
        action = chance.random()
        if action < 0.4 and incoming:
            if chance.random() < 0.2 and len(incoming) > 1:
                incoming[0], incoming[1] = incoming[1], incoming[0]
            if window.can_read(max(newest + 1, incoming[0].row + 1)):
                entry = incoming.pop(0)
                newest = max(newest, entry.row)
                if chance.random() < 0.1:
                    finished.add(entry.row)
                    window.mark_finished(entry.row)
                else:
                    pending.append(entry)
                    window.add(entry)
        elif action < 0.6:
            worker = chance.choice("01")
            group = window.next_group(max_rows, worker)
            want: list[PendingRow] = []
            if pending:
                mine = [e for e in pending if worker in turns and e.lora_id == turns[worker]]
                others = {lora_id for name, lora_id in turns.items() if name != worker}
                free = [e for e in pending if e.lora_id not in others]
                oldest = min(mine or free or pending, key=lambda entry: entry.row)
                turns[worker] = oldest.lora_id
                rest = [e for e in pending if e.lora_id == oldest.lora_id and e is not oldest]
                rest.sort(key=lambda entry: (-entry.prompt_tokens.bit_length(), entry.row))
                want = [oldest, *rest][:max_rows]
            assert group == want
            pending = [entry for entry in pending if entry not in want]
            flying += want
        elif action < 0.7 and flying:
            back = chance.sample(flying, chance.randint(1, len(flying)))
            window.give_back([entry.row for entry in back])
            flying = [entry for entry in flying if entry not in back]
            pending += back
        elif flying:
            entry = flying.pop(chance.randrange(len(flying)))
            finished.add(entry.row)
            window.mark_finished(entry.row)
    assert (window.span, window.nbytes, window.num_pending) == (0, 0, 0)


def run_scattered(rows: int, adapters: int, held: int, workers: int, batch: int) -> float:
    """``rows`` rows, each of a random adapter, through ``workers`` that each hold two batches, whose rows end in any
    order, a few at a time. Checks the bounds and gives the mean rows of a turn once the window has been full: in a
    steady round each adapter gets twice its share of the rows that are held."""
    chance = random.Random(1)
    names = [f"adapter-{i}" for i in range(adapters)]
    window = Window(max_rows=held)
    flying: list[list[int]] = [[] for _ in range(workers)]
    last: list[str | None] = [None] * workers
    seen = bytearray(rows)
    read = finished = turns = in_turns = 0
    while finished < rows:
        while read < rows and window.can_read(min(read + 2048, rows)):
            for number in range(read, min(read + 2048, rows)):
                window.add(PendingRow(number, names[int(chance.random() * adapters)], 64, 100))
            read = min(read + 2048, rows)
            assert window.span <= window.max_span
            assert window.nbytes < 100 * (held + 2048)
        for worker, sent in enumerate(flying):
            while (places := 2 * batch - len(sent)) and window.num_pending:
                group = window.next_group(places, str(worker))
                assert len({entry.lora_id for entry in group}) == 1
                assert 0 < len(group) <= places
                for entry in group:
                    assert not seen[entry.row]
                    seen[entry.row] = 1
                if window.max_span < read < rows:
                    turns += group[0].lora_id != last[worker]
                    in_turns += len(group)
                last[worker] = group[0].lora_id
                sent += [entry.row for entry in group]
            for _ in range(min(len(sent), 1 + chance.randrange(batch // 16))):
                place = chance.randrange(len(sent))
                sent[place], sent[-1] = sent[-1], sent[place]
                window.mark_finished(sent.pop())
                finished += 1
    assert all(seen)
    assert window.span == window.nbytes == window.num_pending == 0
    return in_turns / turns


def test_three_hundred_scattered_adapters_take_long_turns() -> None:
    assert run_scattered(rows=120_000, adapters=300, held=10_000, workers=2, batch=64) >= 1.6 * 10_000 / 300


@pytest.mark.slow
def test_three_hundred_adapters_over_a_million_rows() -> None:
    assert run_scattered(rows=1_000_000, adapters=300, held=65_536, workers=8, batch=256) >= 1.6 * 65_536 / 300
