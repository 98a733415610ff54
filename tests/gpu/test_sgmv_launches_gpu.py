"""How SGMV is launched on a GPU: directly, beside the base product in a graph, and without waiting for anything."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from punica_batch_kernels.elementwise.types import Rotation
from punica_batch_kernels.sgmv import backend_for
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, RowTiles, plan_families, tile_bucket
from punica_batch_kernels.sgmv.types import LoraGroup, Segments
from sgmv_cases import TOLERANCE, check, expected, make_group, make_segments, refill
from torch import Tensor
from torch.nn import functional

CUDA = torch.device("cuda")
WIDTHS = (512, 128, 128)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def empty(dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(0, dtype=dtype, device=CUDA)


def shifted(columns: int, rows: int, by: int) -> Tensor:
    """[rows, columns] of float16 whose first byte is ``2 * by`` beyond a multiple of 16."""
    return torch.randn(rows * columns + by, device=CUDA).half()[by:].view(rows, columns)


def test_direct_launches_are_taken_and_right() -> None:
    """From the second launch of a shape on; other tiles' numbers and rows are still that shape."""
    from punica_batch_kernels.sgmv import triton_backend

    group = make_group([(16,) * 3] * 4, 1024, WIDTHS, empty())
    for rows in (5, 5, 9, 9, 30):
        layout = [(i % 4, 1) for i in range(rows)]
        check(triton_backend.add_lora, group, make_segments(layout, CUDA, PER_ROW), empty())
    for launch in (triton_backend.launch_shrink, triton_backend.launch_expand):
        assert launch._direct, "the installed Triton launches as expected"
        assert launch._compiled


@pytest.mark.parametrize("block_m", [PER_ROW, GROUPED])
def test_unaligned_rows_after_aligned_ones(block_m: int) -> None:
    group = make_group([(16,), (5,)], 1024, (512,), empty())
    segments = make_segments([(0, 3), (1, 2)], CUDA, block_m)
    for by in (0, 0, 1, 3, 0):
        x, y = shifted(1024, 5, by), shifted(512, 5, by)
        want = expected(y, x, group, segments)
        backend_for(CUDA).add_lora(y, x, group, segments)
        torch.testing.assert_close(y.double(), want, atol=1e-2, rtol=1e-2)


def test_nothing_waits_for_the_device() -> None:
    group = make_group([(16,) * 3], 1024, WIDTHS, empty())
    segments = make_segments([(0, 40)], CUDA)
    x, y = torch.randn(40, 1024, device=CUDA).half(), torch.zeros(40, 768, device=CUDA).half()
    backend_for(CUDA).add_lora(y, x, group, segments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend_for(CUDA).add_lora(y, x, group, segments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layers_and_adapters(
    dtype: torch.dtype, layout: list[tuple[int, int]]
) -> tuple[LoraGroup, Segments, Tensor, Tensor]:
    """A group, segments, x and a base weight; the add-on is a third of the base product."""
    group = make_group([(16,) * 3, (5, 0, 8), (0,) * 3, (100, 1, 9)], 1024, WIDTHS, empty(dtype))
    for slot in group.slots:
        if slot is not None:
            slot.a.mul_(0.1)
    x = torch.randn(sum(rows for _, rows in layout), 1024, device=CUDA).to(dtype)
    weight = (torch.randn(sum(WIDTHS), 1024, device=CUDA) / 32).to(dtype)
    return group, make_segments(layout, CUDA), x, weight


MANY_ROWS = {
    "prefill": [(0, 1300), (3, 900)],
    "mixed": [(0, 700), (3, 600), *((i % 4, 1) for i in range(40))],
    "base": [(0, 700), (-1, 300), (2, 50), (3, 600), (-1, 7)],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", MANY_ROWS)
def test_large_prefills_have_the_expand_inside(kind: str, dtype: torch.dtype) -> None:
    """Q/K/V's in the rotation, with 4, 1 and 1 heads of 128, and gate's and up's in the activation; nothing waits."""
    from punica_batch_kernels.sgmv.linear import TritonFusedProducts

    fused = TritonFusedProducts()
    check_close = partial(torch.testing.assert_close, atol=TOLERANCE[dtype] * 2, rtol=TOLERANCE[dtype] * 2)
    group, segments, x, weight = layers_and_adapters(dtype, MANY_ROWS[kind])
    assert segments.all_rows
    wide = make_group([(16, 16), (5, 0), (0, 0), (100, 9)], 1024, (1408, 1408), empty(dtype))
    wide_weight = (torch.randn(2816, 1024, device=CUDA) / 32).to(dtype)
    rows = x.shape[0]
    angles = torch.randn(rows, 1, 64, device=CUDA)
    cos, sin, slots = angles.cos(), angles.sin(), torch.randperm(rows + 32, device=CUDA)[:rows]
    caches = [torch.zeros(-(-rows // 16) + 2, 16, 1, 128, dtype=dtype, device=CUDA) for _ in range(2)]

    def both() -> tuple[Tensor, Tensor]:
        rotation = Rotation(4, None, cos, sin, caches[0], caches[1], slots)
        qkv = fused.rope_and_write_kv(lambda x: functional.linear(x, weight), x, group, segments, rotation)
        return qkv, fused.silu_and_mul(lambda x: functional.linear(x, wide_weight), x, wide, segments)

    both()
    torch.cuda.set_sync_debug_mode("error")
    try:
        qkv, out = both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gate, up = expected(x.double() @ wide_weight.double().t(), x, wide, segments).chunk(2, dim=1)
    # an element's error is as large as gate and up are, whatever their product is
    right = functional.silu(gate) * up
    assert (out - right).norm() < 2 * torch.finfo(dtype).eps * right.norm()
    torch.testing.assert_close(out.double(), right, atol=8 * TOLERANCE[dtype], rtol=8 * TOLERANCE[dtype])
    want = expected(x.double() @ weight.double().t(), x, group, segments).view(rows, 6, 128)
    first, second = want[:, :5].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    check_close(qkv[:, :4].double(), turned[:, :4])
    check_close(caches[0].flatten(0, 1)[slots].double(), turned[:, 4:])
    check_close(caches[1].flatten(0, 1)[slots].double(), want[:, 5:])


@pytest.mark.parametrize("rows", [400, 700])
def test_a_graph_is_replayed_with_base_rows(rows: int) -> None:
    from punica_batch_kernels.sgmv import linear

    group, segments, x, weight = layers_and_adapters(torch.float16, [(0, rows)])
    run = linear.OrderedLinear(CUDA)

    def step() -> Tensor:
        return run(lambda x: functional.linear(x, weight), x, group, segments)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    assert segments.tiles is not None
    refill(segments.tiles[0], [0, 5, rows - 59], [-1, 0])
    graph.replay()
    want = functional.linear(x[:5], weight)
    torch.testing.assert_close(y[:5], want)


@pytest.mark.parametrize("block_m", [PER_ROW, GROUPED])
def test_room_for_many_more_tiles(block_m: int) -> None:
    """Few and all in use; the expand takes them in turn."""
    group = make_group([(16,) * 3, (128, 3, 0)], 1024, WIDTHS, empty())
    for rows in (3, 600):
        segments = make_segments([(i % 2, 1) for i in range(rows)], CUDA, block_m, num_tiles=640)
        check(backend_for(CUDA).add_lora, group, segments, empty())


def static_tiles(starts: list[int], slots: list[int]) -> tuple[RowTiles, ...]:
    """Padded to buckets, as an engine with static buffers has them."""
    return tuple(
        RowTiles.build(starts, slots, CUDA, family.block_m, tile_bucket(family.num_tiles), family.segments)
        for family in plan_families(starts, slots)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["distinct", "identical"])
def test_a_graph_of_layers_with_shrinks_beside_the_products(kind: str, dtype: torch.dtype) -> None:
    """Each layer's input is made from the one before, so that nothing may start early, nor memory be reused early."""
    rows, hidden, layers = 32, 1024, 6
    tolerance = 1e-2 if dtype == torch.float16 else 6e-2
    slots = list(range(rows)) if kind == "distinct" else [0]
    starts = list(range(rows + 1)) if kind == "distinct" else [0, rows]
    shapes = [((hidden,), hidden), ((512, 256, 256), hidden)] * layers
    groups = [make_group([(16,) * len(w)] * rows, into, w, empty(dtype), 32) for w, into in shapes]
    weights = [(torch.randn(sum(w), into, device=CUDA) / into**0.5).to(dtype) for w, into in shapes]
    segments = Segments.build(starts, slots, tiles=static_tiles(starts, slots))
    backend = backend_for(CUDA)
    assert backend.lora_linear is not None
    x0 = torch.randn(rows, hidden, device=CUDA).to(dtype)

    def forward(linear: object) -> list[Tensor]:
        x, ys = x0, []
        for group, weight in zip(groups, weights, strict=True):
            y = linear(lambda x, weight=weight: functional.linear(x, weight), x, group, segments)  # type: ignore[operator]
            ys.append(y)
            x = functional.rms_norm(y, y.shape[-1:])
        return ys

    def one_after_the_other(base: object, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        y: Tensor = base(x)  # type: ignore[operator]
        backend.add_lora(y, x, group, segments)
        return y

    forward(backend.lora_linear)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(backend.lora_linear)
    for _ in range(5):
        x0.normal_()
        want = forward(one_after_the_other)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["distinct", "identical"])
def test_a_graph_whose_layers_add_to_one_stream(kind: str) -> None:
    """As a decoder's residual: base product and add-on go onto the tensor that the next layer's input is made from."""
    rows, hidden, layers = 32, 1024, 6
    slots = list(range(rows)) if kind == "distinct" else [0]
    starts = list(range(rows + 1)) if kind == "distinct" else [0, rows]
    groups = [make_group([(16,)] * rows, hidden, (hidden,), empty(), 32) for _ in range(layers)]
    for group in groups:
        for slot in group.slots:
            assert slot is not None
            slot.a.mul_(0.25)  # add-ons half as large as the products
    weights = [(torch.randn(hidden, hidden, device=CUDA) / 32).half() for _ in range(layers)]
    segments = Segments.build(starts, slots, tiles=static_tiles(starts, slots))
    backend = backend_for(CUDA)
    assert backend.lora_linear is not None
    run = backend.lora_linear
    start, stream = (torch.randn(rows, hidden, device=CUDA).half() for _ in range(2))

    def add_product(weight: Tensor, x: Tensor) -> Tensor:
        return stream.addmm_(x, weight.t())

    def forward() -> None:
        stream.copy_(start)
        for group, weight in zip(groups, weights, strict=True):
            x = functional.rms_norm(stream, stream.shape[-1:], eps=1e-5)
            y = run(partial(add_product, weight), x, group, segments)
            assert y is stream

    def exact() -> Tensor:
        y = start.double()
        for group, weight in zip(groups, weights, strict=True):
            x = functional.rms_norm(y, y.shape[-1:], eps=1e-5)
            y = expected(y + x @ weight.double().t(), x, group, segments)
        return y

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for _ in range(5):
        start.normal_()
        for _ in range(3):
            graph.replay()
        torch.testing.assert_close(stream.double(), exact(), atol=3e-2, rtol=1e-2)
