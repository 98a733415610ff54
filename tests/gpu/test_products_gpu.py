"""Products of few rows on a GPU against float64: bfloat16 too, in a graph, and without a synchronization."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from products_cases import check, operands
from punica_batch_kernels.products.few_rows import FewRowsLinear
from punica_batch_kernels.products.few_rows_config import FewRowsConfig

CUDA = torch.device("cuda")
WEIGHTS_AS_M = FewRowsConfig(block_n=64, block_k=128, transposed=True, num_warps=4, num_stages=3, prefetch=512)
CONFIGS = {
    "weights as M": WEIGHTS_AS_M,
    "rows as M": FewRowsConfig(block_n=32, block_k=128, transposed=False, num_warps=4, num_stages=4, prefetch=512),
    "split": replace(WEIGHTS_AS_M, split_k=4),
    "shared by 132": replace(WEIGHTS_AS_M, programs=132),
    "shared by 1000": replace(WEIGHTS_AS_M, programs=1000),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def linear_by(config: FewRowsConfig) -> FewRowsLinear:
    return FewRowsLinear(CUDA, lambda *shape: config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_against_float64(config: FewRowsConfig, dtype: torch.dtype) -> None:
    linear = linear_by(config)
    for rows, out_features, in_features, bias in (
        (1, 4096, 4096, False),
        (7, 1000, 1000, True),
        (32, 12288, 4096, False),
        (33, 4096, 11008, True),
        (64, 32003, 4096, False),
    ):
        check(linear, *operands(rows, out_features, in_features, dtype, CUDA, bias=bias))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_chain_in_a_graph(config: FewRowsConfig) -> None:
    """Each product needs all of the one before, which runs beside it up to its wait."""
    linear = linear_by(config)
    layers = [operands(16, 4096, 4096, torch.float16, CUDA, bias=True)[1:] for _ in range(8)]
    x = torch.randn(16, 4096, device=CUDA, dtype=torch.float16)

    def run() -> torch.Tensor:
        stream = x.clone()
        for weight, bias in layers:
            linear.add_to(stream, linear(stream, weight, bias), weight, None)
            stream *= 0.5
        return stream

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(3):
        x.normal_()
        graph.replay()
        exact = x.double()
        for weight, bias in layers:
            assert bias is not None
            once = exact @ weight.double().t() + bias.double()
            exact = (exact + once @ weight.double().t()) * 0.5
        assert torch.equal(y, run()), "the same bits"
        torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)


def test_nothing_waits_for_the_device() -> None:
    linear = linear_by(CONFIGS["shared by 132"])
    x, weight, bias = operands(8, 4096, 4096, torch.float16, CUDA, bias=True)
    y = linear(x, weight, bias)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear(x, weight, bias)
        linear.add_to(y, x, weight, bias)
    finally:
        torch.cuda.set_sync_debug_mode("default")
