"""The Triton SGMV kernels on a GPU against float64: bfloat16 too, up to 4,096 rows, and under CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from punica_batch_kernels.sgmv import backend_for
from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL
from punica_batch_kernels.sgmv.types import Segments
from sgmv_cases import check, expected, make_group, make_segments, make_slot, popularity, refill

CUDA = torch.device("cuda")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FAMILIES = (PER_ROW, GROUPED, PREFILL)
KINDS = ("identical", "distinct", "uniform", "skewed")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_m", FAMILIES)
def test_every_rank(block_m: int, dtype: torch.dtype) -> None:
    group = make_group([(r,) for r in range(1, 257)], 264, (136,), empty(dtype))
    layout = [(-1, 2), *((s, (1, 3, 0, 2, 70)[s % 5]) for s in range(256)), (-1, 1), (255, 1), (2, 2), (0, 1)]
    check(backend_for(CUDA).add_lora, group, make_segments(layout, CUDA, block_m), empty(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 256, 1000, 4096])
def test_popularities(rows: int, dtype: torch.dtype) -> None:
    """Grouped Q/K/V of an 8B model, ranks from 8 to 128; the family that the rule chooses."""
    ranks = [(16, 16, 16), (8, 8, 8), (128, 128, 128), (64, 0, 64), (12, 12, 12), (1, 2, 3)]
    group = make_group(ranks, 4096, (4096, 1024, 1024), empty(dtype))
    for kind in KINDS:
        layout = popularity(kind, rows, len(ranks))
        check(backend_for(CUDA).add_lora, group, make_segments(layout, CUDA), empty(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("in_features", "widths"), [(11008, (4096,)), (4096, (11008, 11008)), (4096, (128256,))])
def test_the_other_groups(in_features: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    group = make_group([(16,) * len(widths), (40,) * len(widths)], in_features, widths, empty(dtype))
    for layout in ([(0, 5), (-1, 2), (1, 1)], [(0, 100), (1, 60), (-1, 3)], [(i % 2, 1) for i in range(40)]):
        check(backend_for(CUDA).add_lora, group, make_segments(layout, CUDA), empty(dtype))


@pytest.mark.parametrize("block_m", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_captured_graph_serves_other_segments(block_m: int, dtype: torch.dtype) -> None:
    """Fewer, as many and more adapters than at capture, base rows, and an adapter loaded after it."""
    rows, slots, widths = 48, 12, (512, 128, 128)
    groups = [make_group([(16,) * 3] * 11 + [(0,) * 3], 1024, widths, empty(dtype), 64) for _ in range(3)]
    tables = SlotTables(groups, 64, dtype, CUDA)
    segments = make_segments([(3, 30), (1, 18)], CUDA, block_m, num_tiles=rows)
    x = torch.randn(rows, 1024, device=CUDA).to(dtype)
    base = torch.randn(rows, 768, device=CUDA).to(dtype)
    ys = [torch.empty_like(base) for _ in groups]

    def step() -> None:
        for y, group in zip(ys, groups, strict=True):
            y.copy_(base)
            backend_for(CUDA).add_lora(y, x, group, segments)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    layouts = [[(3, 30), (1, 18)], [(-1, 48)], [(5, 48)], [(i % slots, 1) for i in range(rows)], [(11, 20), (-1, 28)]]
    for layout in layouts:
        if layout[0][0] == 11:
            for group in groups:
                group.slots[11] = make_slot((64, 5, 1), 1024, widths, empty(dtype))
            tables.install(11)
        now = make_segments(layout, CUDA, block_m)
        assert segments.tiles is not None
        refill(segments.tiles[0], now.seg_indptr, now.lora_indices)
        x.copy_(torch.randn(rows, 1024, device=CUDA))
        graph.replay()
        for y, group in zip(ys, groups, strict=True):
            want = expected(base, x, group, now)
            tolerance = 4e-3 if dtype == torch.float16 else 3e-2
            torch.testing.assert_close(y.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_m", FAMILIES)
def test_the_same_step_gives_the_same_bits(block_m: int) -> None:
    """No sum depends on which program comes first."""
    group = make_group([(16, 16), (100, 7)], 4096, (1024, 1024), empty(torch.float16))
    segments = make_segments([(0, 50), (1, 1), (0, 13)], CUDA, block_m)
    x = torch.randn(64, 4096, device=CUDA).half()
    ys = [torch.ones(64, 2048, device=CUDA).half() for _ in range(20)]
    for y in ys:
        backend_for(CUDA).add_lora(y, x, group, segments)
    assert all(torch.equal(ys[0], y) for y in ys[1:])


def test_segments_built_on_the_device_bring_their_tiles() -> None:
    group = make_group([(16,)], 256, (256,), empty(torch.float16))
    check(backend_for(CUDA).add_lora, group, Segments.build([0, 2, 5], [-1, 0], CUDA), empty(torch.float16))
