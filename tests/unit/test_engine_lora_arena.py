"""The arena against a byte map: what is handed out is nobody else's, and all of it comes back."""

from __future__ import annotations

import random

import pytest

from punica_batch.engine.lora_arena import Arena, NoRoom


class Step:
    """An enqueued step that is over when told so, or waited for."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("seed", range(6))
def test_random_use_against_a_byte_map(seed: int) -> None:
    """``NoRoom`` comes exactly when no run of free bytes, those being freed included, is long enough."""
    choose = random.Random(seed)
    size = 97
    arena = Arena(size)
    owner: list[int | None] = [None] * size
    held: dict[int, tuple[int, int]] = {}
    steps: list[Step] = []
    for name in range(2000):
        if held and choose.random() < 0.5:
            start, nbytes = held.pop(choose.choice(list(held)))
            owner[start : start + nbytes] = [None] * nbytes
            steps.append(Step())
            arena.free(start, nbytes, steps[-1] if choose.random() < 0.5 else None)
        else:
            nbytes = choose.randint(1, 30)
            runs = "".join("." if o is None else "x" for o in owner).split("x")
            fits = max(map(len, runs)) >= nbytes
            if not fits:
                with pytest.raises(NoRoom) as caught:
                    arena.allocate(nbytes, str(name))
                assert caught.value.nbytes == nbytes
                continue
            start = arena.allocate(nbytes, str(name))
            assert owner[start : start + nbytes] == [None] * nbytes
            owner[start : start + nbytes] = [name] * nbytes
            held[name] = start, nbytes
        if steps and choose.random() < 0.3:
            steps.pop(0).is_over = True
        assert arena.free_bytes == owner.count(None)
        assert arena.reserve("other", arena.free_bytes)
        assert not arena.reserve("more", 1)
        arena.cancel("other")


def test_bytes_that_a_step_reads_are_not_handed_out_before_it_is_over() -> None:
    arena, step = Arena(100), Step()
    first = arena.allocate(60, "a")
    arena.free(first, 60, step)
    assert arena.allocate(40, "b") == 60  # beside it, without waiting
    assert not step.is_over
    assert arena.allocate(50, "c") == 0
    assert step.is_over  # was waited for


def test_what_is_reserved_is_kept_until_its_name_allocates() -> None:
    arena = Arena(100)
    assert arena.reserve("a", 60)
    assert not arena.reserve("b", 41)
    assert arena.reserve("b", 40)
    assert arena.allocate(60, "a") == 0
    assert not arena.reserve("c", 1)  # a's 60 bytes count once, b's still do
    arena.cancel("b")
    arena.cancel("a")  # has none any more
    assert arena.reserve("d", 40)
    assert arena.reserve("d", 40)  # in place of its own
    assert not arena.reserve("e", 1)
    arena.cancel("d")
    assert arena.reserve("c", 40)


def test_what_is_reserved_is_kept_while_its_name_waits_for_what_is_being_freed() -> None:
    arena = Arena(100)
    started = []

    class Watched(Step):
        def synchronize(self) -> None:
            started.append(arena.reserve("small", 1))  # as another thread may meanwhile
            super().synchronize()

    first = arena.allocate(60, "x")
    arena.free(first, 60, Watched())
    assert arena.reserve("big", 100)
    assert arena.allocate(100, "big") == 0
    assert started == [False]
