"""The Triton SGMV kernels against float64, in Triton's interpreter on the CPU (float16 and float32; its bfloat16
products are wrong). Triton reads TRITON_INTERPRET when it is imported: the file runs itself in a process of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from interpreter import INTERPRETED, run_in_interpreter
from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, RowTiles
from punica_batch_kernels.sgmv.types import LoraGroup, Segments
from sgmv_cases import check, expected, make_group, make_segments, make_slot, popularity, refill
from torch import Tensor

CPU = torch.device("cpu")
FAMILIES = (PER_ROW, GROUPED, PREFILL)
DTYPES = (torch.float32, torch.float16)
WIDTHS = (96, 40, 24)  # three slices of different widths, like grouped Q/K/V

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

else:
    from punica_batch_kernels.sgmv import linear, triton_backend, triton_config

    plan = triton_backend._cached_plan

    @pytest.fixture(autouse=True)
    def nan_filled(monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the backend allocates holds NaN until it is written."""
        monkeypatch.setattr(triton_backend.torch, "empty", lambda *size, **how: torch.full(size, math.nan, **how))
        torch.manual_seed(0)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("block_m", FAMILIES)
    def test_every_rank(block_m: int, dtype: torch.dtype) -> None:
        """Ranks from 1 to 256, odd ones too, in one batch with base rows and empty segments between them."""
        ranks = [1, 2, 3, 5, 7, 8, 12, 16, 17, 31, 33, 64, 100, 129, 255, 256]
        group = make_group([(r,) for r in ranks], 72, (56,), torch.empty(0, dtype=dtype))
        layout = [(-1, 2), *((s, (1, 3, 0, 2)[s % 4]) for s in range(len(ranks))), (-1, 1), (15, 1), (2, 2), (0, 1)]
        check(triton_backend.add_lora, group, make_segments(layout, CPU, block_m), torch.empty(0, dtype=dtype))

    @pytest.mark.parametrize("kind", ["identical", "distinct", "uniform", "skewed"])
    @pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float16), (17, torch.float32), (203, torch.float16)])
    def test_popularities(kind: str, rows: int, dtype: torch.dtype) -> None:
        """In the family that the rule chooses; K split, and not a multiple of any block."""
        like = torch.empty(0, dtype=dtype)
        group = make_group([(4, 4, 4), (2, 8, 1), (16, 16, 16), (3, 0, 9), (8, 8, 8)], 1000, WIDTHS, like)
        check(triton_backend.add_lora, group, make_segments(popularity(kind, rows, 5), CPU), like)

    @pytest.mark.parametrize("block_m", FAMILIES)
    def test_slices_without_rank_and_slots_without_weights(block_m: int) -> None:
        like = torch.empty(0, dtype=torch.float32)
        ranks = [(0, 8, 0), (5, 0, 0), (0, 0, 0), (0, 0, 20), (4, 0, 4)]
        layout = [(0, 3), (2, 2), (1, 1), (-1, 2), (3, 2), (4, 17), (2, 1)]
        check(triton_backend.add_lora, make_group(ranks, 64, WIDTHS, like), make_segments(layout, CPU, block_m), like)

    @pytest.mark.parametrize("block_m", FAMILIES)
    def test_a_given_buffer_holds_v(block_m: int) -> None:
        """Only the true ranks' columns of rows with adapters are written."""
        like = torch.empty(0, dtype=torch.float16)
        group = make_group([(2, 0, 3), (8, 8, 8)], 80, WIDTHS, like)
        segments = make_segments([(0, 2), (-1, 1), (1, 1)], CPU, block_m)
        buffer = torch.full((4, 30), math.nan, dtype=torch.float16)[:, 2:-1]

        def add_lora(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> None:
            triton_backend.add_lora(y, x, group, segments, buffer)

        check(add_lora, group, segments, like)
        written = ~torch.isnan(buffer)
        assert written[:2, :5].all()
        assert not written[:2, 5:].any()
        assert not written[2].any()
        assert written[3, :24].all()
        assert not written[3, 24:].any()

    @pytest.mark.parametrize("block_m", FAMILIES)
    def test_the_same_buffers_serve_the_next_step(block_m: int) -> None:
        """As a replayed graph does: other segments, more and fewer adapters, another adapter in a slot."""
        like = torch.empty(0, dtype=torch.float32)
        groups = [make_group([(4, 4), (2, 8), (0, 0)], 48, WIDTHS[:2], like) for _ in range(2)]
        tables = SlotTables(groups, 16, torch.float32, CPU)
        segments = make_segments([(0, 9)], CPU, block_m, num_tiles=9)
        for layout in ([(0, 9)], [(1, 4), (-1, 1), (0, 3), (2, 1)], [(-1, 9)], [(2, 2), (1, 7)]):
            if layout[0][0] == 2:
                for group in groups:
                    group.slots[2] = make_slot((16, 3), 48, WIDTHS[:2], like)
                tables.install(2)
            now = make_segments(layout, CPU, block_m)
            assert segments.tiles is not None
            refill(segments.tiles[0], now.seg_indptr, now.lora_indices)
            now = replace(now, tiles=segments.tiles)
            for group in groups:
                check(triton_backend.add_lora, group, now, like)

    def test_a_row_does_not_depend_on_its_neighbours() -> None:
        """The same launch gives a row the same bits, whatever adapters the rest of the batch has."""
        like = torch.empty(0, dtype=torch.float32)
        group = make_group([(4,), (16,), (9,)], 700, (64,), like)
        x, y = torch.randn(8, 700), torch.zeros(2, 8, 64)
        for out, layout in zip(y, ([(1, 3), (0, 5)], [(1, 1), (2, 6), (-1, 1)]), strict=True):
            triton_backend.add_lora(out, x, group, make_segments(layout, CPU, PER_ROW, num_tiles=8))
        assert torch.equal(y[0, 0], y[1, 0])
        assert not torch.equal(y[0, 4], y[1, 4])

    @pytest.mark.parametrize("block_m", [PER_ROW, GROUPED])
    def test_programs_are_shared_by_the_tiles_in_use(block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Room for many more tiles, in turn where the expand has fewer programs; few, many and no tiles in use."""
        monkeypatch.setitem(triton_config._SHRINK_PROGRAMS, block_m, 24)
        monkeypatch.setitem(triton_config.MAX_EXPAND_TILES, block_m, 3)
        like = torch.empty(0, dtype=torch.float32)
        group = make_group([(4, 4), (40, 8), (0, 3)], 136 + block_m, WIDTHS[:2], like)
        plans = []
        monkeypatch.setattr(triton_backend, "_cached_plan", lambda *args: plans.append(plan(*args)) or plans[-1])
        for layout in ([(0, 3)], [(1, 2), (-1, 4), (2, 1)], [(i % 3, 1) for i in range(11)], [(-1, 4)]):
            segments = make_segments(layout, CPU, block_m, num_tiles=20)
            check(triton_backend.add_lora, group, segments, like)
        assert all(used.in_turn for used in plans)

    def test_a_large_prefill_takes_all_rows_along() -> None:
        """Segments long and short, base rows between them, ranks above what the expand holds; columns of several
        blocks, the last of them not whole."""
        like = torch.empty(0, dtype=torch.float16)
        group = make_group([(8, 0, 8), (5, 0, 0), (0, 0, 0), (0, 70, 20)], 1000, (1096, 40, 200), like)
        segments = make_segments([(0, 520), (-1, 3), (3, 5), *[(1, 1)] * 18, (2, 2)], CPU)
        assert segments.tiles is not None
        assert [tiles.block_m for tiles in segments.tiles] == [PREFILL]
        check(triton_backend.add_lora, group, segments, like)

    @pytest.mark.parametrize("rows", [100, 600])
    def test_both_parts_are_added_to_an_older_tensor(rows: int) -> None:
        """The residual stream: whatever the number of rows, it is added to once by either part, in place."""
        like = torch.empty(0, dtype=torch.float32)
        group = make_group([(4,), (20,), (0,)], 72, WIDTHS[:1], like)
        segments = make_segments([(0, rows), (-1, 3), (1, 5), (2, 4)], CPU)
        x, stream = torch.randn(rows + 12, 72), torch.randn(rows + 12, WIDTHS[0])
        weight = torch.randn(WIDTHS[0], 72) / 72**0.5
        want = expected(stream.double() + x.double() @ weight.t().double(), x, group, segments)
        got = linear.OrderedLinear(CPU)(lambda x: stream.addmm_(x, weight.t()), x, group, segments)
        assert got is stream
        torch.testing.assert_close(stream.double(), want, atol=1e-4, rtol=1e-4)

    def test_what_the_kernels_cannot_address_is_refused() -> None:
        like = torch.empty(0, dtype=torch.float32)
        group = make_group([(4,)], 48, (32,), like)
        segments = make_segments([(0, 2)], CPU)
        x, y = torch.randn(2, 48), torch.zeros(2, 32)
        with pytest.raises(ValueError, match="adjacent"):
            triton_backend.add_lora(y, x.double(), group, segments)
        with pytest.raises(ValueError, match="adjacent"):
            triton_backend.add_lora(y.t().contiguous().t(), x, group, segments)
        with pytest.raises(ValueError, match="without tiles"):
            triton_backend.add_lora(y, x, group, Segments.build([0, 2], [0]))
        with pytest.raises(ValueError, match="slot table"):
            triton_backend.add_lora(y, x, LoraGroup(48, (0, 32), list(group.slots)), segments)
        with pytest.raises(ValueError, match="maximum of 2"):
            SlotTables([group], 2, torch.float32, CPU)
        weights = group.slots[0]
        assert weights is not None
        with pytest.raises(ValueError, match=r"torch\.float16"):
            SlotTables([group], 4, torch.float16, CPU)
        by_row = weights.b_t[0]
        assert by_row is not None
        group.slots[0] = type(weights)(weights.a, (by_row.t().contiguous(),), weights.ranks)
        with pytest.raises(ValueError, match="contiguous"):
            SlotTables([group], 4, torch.float32, CPU)
        with pytest.raises(ValueError, match="need 3 tiles"):
            RowTiles.build([0, 3], [0], CPU, block_m=1, num_tiles=2)
