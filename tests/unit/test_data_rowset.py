from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from punica_batch.data.rowset import RowSet

rows = st.integers(0, 200_000)


@given(st.lists(rows), st.lists(rows), st.lists(st.tuples(rows, st.integers(0, 70_000)), max_size=3), st.lists(rows))
def test_agrees_with_a_set(
    one_by_one: list[int], many: list[int], ranges: list[tuple[int, int]], gone: list[int]
) -> None:
    got, want = RowSet(), set()
    for row in one_by_one:
        got.add(row)
        want.add(row)
    got.add_many(many)
    want.update(many)
    for start, length in ranges:
        got.add_range(start, start + length)
        want.update(range(start, start + length))
    for row in gone:
        got.discard(row)
        want.discard(row)
    assert len(got) == len(want)
    assert list(got) == sorted(want)
    probes = [*one_by_one, *gone, 0, 65_535, 65_536, 131_072, 199_999]
    assert [row in got for row in probes] == [row in want for row in probes]
    assert got.contains_many(probes).tolist() == [row in want for row in probes]
    for start, stop in [(0, 1), (0, 65_536), (65_530, 65_540), (10, 180_000), (70_000, 70_000)]:
        inside = [row for row in range(start, stop) if row in want]
        assert got.count(start, stop) == len(inside)
        assert got.missing(start, stop).tolist() == sorted(set(range(start, stop)) - set(inside))
    for start in (0, 65_535, 100_000):
        assert got.first_missing(start) == next(row for row in range(start, 400_000) if row not in want)


def test_first_missing_over_full_chunks() -> None:
    done = RowSet()
    done.add_range(0, 200_000)
    assert done.first_missing(0) == 200_000
    assert done.first_missing(300_000) == 300_000
    assert len(done._chunks) == 4
    assert sum(bitmap.nbytes for bitmap in done._chunks.values()) == 4 * 65_536 // 8


def test_accepts_numpy_rows() -> None:
    done = RowSet()
    done.add_many(np.array([5, 5, 70_000]))
    assert np.int64(5) in done
    assert len(done) == 2
