"""The device kernels' work lists, on the host: against a plain loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from punica_batch_kernels.sgmv import backend_for, reference
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, build_tiles, choose_families, cut_tiles
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
    used = sum(-(-rows // block_m) for slot, rows in layout if slot >= 0)
    entries = cut_tiles(starts, [slot for slot, _ in layout], block_m, used + spare)
    assert entries.shape == (used + spare, 4)
    got = [-1] * len(want)
    for first, rows, slot, _ in entries.tolist():
        assert rows <= block_m
        for row in range(first, first + rows):
            assert got[row] == -1, "a row is in two tiles"
            got[row] = slot
    assert got == want


@given(layout=segments, long=st.booleans())
def test_families_share_the_segments(layout: list[tuple[int, int]], long: bool) -> None:
    layout = layout + [(0, 600)] * long
    families = choose_families(starts_of([rows for _, rows in layout]), [slot for slot, _ in layout])
    for i, (slot, rows) in enumerate(layout):
        if rows:
            assert [slots[i] for _, slots in families if slots[i] >= 0] == ([slot] if slot >= 0 else [])


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
        ([256] * 8 + [1] * 248, [PREFILL, PER_ROW]),
        ([1024] + [8] * 20, [PREFILL, GROUPED]),
        ([], []),
    ],
)
def test_the_rule(lengths: list[int], families: list[int]) -> None:
    assert [block_m for block_m, _ in choose_families(starts_of(lengths), list(range(len(lengths))))] == families


def test_base_rows_have_no_tiles() -> None:
    assert build_tiles([0, 5, 9], [-1, -1], "cpu") == ()
    assert Segments.build([0, 5], [0]).tiles is None, "on the CPU nothing reads them"


def test_the_backend_follows_the_device() -> None:
    backend = backend_for(torch.device("cpu"))
    assert (backend.name, backend.add_lora) == ("reference", reference.add_lora)
