"""The device kernels' work lists, on the host: against a plain loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from punica_batch_kernels.sgmv import backend_for, reference
from punica_batch_kernels.sgmv.tiles import (
    GROUPED,
    PER_ROW,
    PREFILL,
    build_tiles,
    cut_tiles,
    plan_families,
    take_all_rows,
    tile_bucket,
)
from punica_batch_kernels.sgmv.types import Segments


def starts_of(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


segments = st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 80)), max_size=12)


@given(layout=segments, block_m=st.sampled_from([1, 2, 16, 64]), spare=st.integers(0, 3))
def test_tiles_cover_each_row_once(layout: list[tuple[int, int]], block_m: int, spare: int) -> None:
    starts = starts_of([rows for _, rows in layout])
    want = [slot for slot, rows in layout for _ in range(rows)]
    used = sum(-(-rows // block_m) for _, rows in layout)
    entries = cut_tiles(starts, [slot for slot, _ in layout], block_m, used + spare)
    assert entries.shape == (used + spare, 4)
    got: list[int | None] = [None] * len(want)
    for first, rows, slot, sharing in entries.tolist():
        assert sharing == min(tile_bucket(used), used + spare)
        assert rows <= block_m
        for row in range(first, first + rows):
            assert got[row] is None, "a row is in two tiles"
            got[row] = slot
    assert got == want


@given(layout=segments, long=st.booleans(), all_rows=st.booleans())
def test_families_share_the_segments(layout: list[tuple[int, int]], long: bool, all_rows: bool) -> None:
    layout = layout + [(0, 600)] * long
    starts = starts_of([rows for _, rows in layout])
    all_rows = all_rows and take_all_rows(starts, [slot for slot, _ in layout])
    families = plan_families(starts, [slot for slot, _ in layout], all_rows=all_rows)
    for i, (_, rows) in enumerate(layout):
        if rows:
            assert sum(bool(family.segments[i]) for family in families) == (layout[i][0] >= 0 or all_rows)
    slots = [slot for slot, _ in layout]
    assert bool(families) == any(slot >= 0 and rows for slot, rows in layout)
    for family in families:
        entries = cut_tiles(starts, slots, family.block_m, segments=family.segments)
        assert family.num_tiles == len(entries) > 0
        assert (entries[:, 2] >= 0).any()


@pytest.mark.parametrize(
    ("lengths", "families"),
    [
        ([1] * 32, [PER_ROW]),
        ([1], [PER_ROW]),
        ([32], [GROUPED]),
        ([256], [GROUPED]),
        ([16] * 16, [GROUPED]),
        ([13, 9, 4, 3, 2, 1], [GROUPED]),
        ([2] + [1] * 30, [PER_ROW]),
        ([512] * 8, [PREFILL]),
        ([4096], [PREFILL]),
        ([256] * 8 + [1] * 4, [PREFILL]),
        ([256] * 8 + [1] * 16, [PREFILL]),
        ([256] * 8 + [1] * 17, [PREFILL, PER_ROW]),
        ([1024] + [8] * 20, [PREFILL, GROUPED]),
        ([60] + [1] * 31, [PER_ROW]),
        ([60] + [1] * 255, [PER_ROW]),
        ([500] + [1] * 255, [GROUPED, PER_ROW]),
        ([16] * 20 + [1] * 4, [GROUPED]),
        ([], []),
    ],
)
def test_the_rule(lengths: list[int], families: list[int]) -> None:
    assert [f.block_m for f in plan_families(starts_of(lengths), list(range(len(lengths))))] == families


@pytest.mark.parametrize(
    ("layout", "takes"),
    [
        ([(0, 512)], True),
        ([(0, 511)], False),
        ([(0, 256), (1, 256), *((i, 1) for i in range(32))], True),
        ([(0, 256), (1, 256), *((i, 1) for i in range(33))], False),  # too many short ones
        ([(0, 512), (-1, 512), (-1, 0)], True),
        ([(0, 512), (-1, 513)], False),  # most rows are the base model's
        ([(-1, 4096)], False),
        ([(i, 1) for i in range(600)], False),
        ([], False),
    ],
)
def test_large_prefills_take_all_rows(layout: list[tuple[int, int]], takes: bool) -> None:
    starts, slots = starts_of([rows for _, rows in layout]), [slot for slot, _ in layout]
    assert take_all_rows(starts, slots) is takes


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60))
def test_long_segments_read_an_adapter_by_the_tile(lengths: list[int]) -> None:
    """No layout reads an adapter row by row where tiles would read it a quarter as often."""
    families = plan_families(starts_of(lengths), list(range(len(lengths))))
    assert sum(f.num_tiles for f in families) <= 4 * sum(-(-n // GROUPED) for n in lengths)


@pytest.mark.parametrize(("needed", "padded"), [(0, 0), (1, 8), (8, 8), (9, 16), (16, 16), (200, 256), (256, 256)])
def test_tiles_are_padded_to_few_counts(needed: int, padded: int) -> None:
    assert tile_bucket(needed) == padded


def test_base_rows_have_no_tiles() -> None:
    assert build_tiles([0, 5, 9], [-1, -1], "cpu") == ()
    assert Segments.build([0, 5], [0]).tiles is None, "on the CPU nothing reads them"


def test_the_backend_follows_the_device() -> None:
    backend = backend_for(torch.device("cpu"))
    assert (backend.name, backend.add_lora) == ("reference", reference.add_lora)
