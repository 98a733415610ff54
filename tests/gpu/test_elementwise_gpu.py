"""Norms and activation by FlashInfer, and the rotation kernel, against float64; results are as good as torch's.

The first run on a machine compiles kernels for half a minute.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from punica_batch_kernels.backend import REFERENCE, Kernels, _with_elementwise
from punica_batch_kernels.elementwise.types import Rotation
from rope_cases import check_rope_and_write_kv, normed
from torch import Tensor
from torch.nn import functional

CUDA = torch.device("cuda")
DTYPES = (torch.float16, torch.bfloat16)
ROWS = (1, 32, 257, 4096)
SIZES = (64, 100, 1000, 4096, 5120, 8192, 18944)  # 100: a row is not a multiple of 16 bytes


@cache
def kernels(dtype: torch.dtype) -> Kernels:
    made = _with_elementwise(REFERENCE, dtype, CUDA)
    assert made.note is None
    return made


def rand(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(shape[0])
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def check(got: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """At most twice the error of plain torch, which rounds as Hugging Face does, and near float64."""
    error, theirs = ((x.double() - exact).abs() for x in (got, torchs))
    assert float(error.mean()) <= 2 * float(theirs.mean())
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=1.1 * eps, atol=eps * 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = rand(rows + 1, size, dtype=dtype)[1:], rand(size, dtype=dtype)
    got = kernels(dtype).rms_norm(x, weight, 1e-5)
    check(got, REFERENCE.rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 1000, 1004, 1536, 11008, 14336, 18944])
@pytest.mark.parametrize("rows", ROWS)
def test_silu_and_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    x = rand(rows, 2 * size, dtype=dtype) * 4
    gate, up = x.double().chunk(2, dim=-1)
    check(kernels(dtype).silu_and_mul(x), REFERENCE.silu_and_mul(x), functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((32, 32), 128), ((32, 8), 128), ((40, 40), 128), ((9, 3), 64), ((14, 2), 80)]
)
@pytest.mark.parametrize("rows", [1, 33, 2048])
def test_rope_and_write_kv(rows: int, heads: tuple[int, int], head_dim: int, norm: bool, dtype: torch.dtype) -> None:
    check_rope_and_write_kv(kernels(dtype).rope_and_write_kv, rows, heads, head_dim, dtype, "cuda", norm=norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_layer_follows_its_buffers(dtype: torch.dtype) -> None:
    """New rows, positions and slots in the same buffers, and the same bits as launched one by one."""
    made, rows = kernels(dtype), 40
    x, residual, product = (rand(n, 512, dtype=dtype) for n in (rows, rows, 512))
    weight, qkv = rand(512, dtype=dtype), torch.empty(rows, 12, 64, dtype=dtype, device=CUDA)
    cos, sin = torch.empty(2, rows, 1, 32, device=CUDA)
    caches = torch.zeros(2, 8, 16, 2, 64, dtype=dtype, device=CUDA)
    slots = torch.empty(rows, dtype=torch.int64, device=CUDA)
    sources = [x, residual, product, qkv, cos, sin, slots]

    def step() -> list[Tensor]:
        made.add_linear(residual, x, product, None)
        y = made.rms_norm(residual, weight, 1e-6)
        made.rope_and_write_kv(qkv, Rotation(8, None, cos, sin, caches[0], caches[1], slots))
        return [y, made.silu_and_mul(y.view(rows, 512))]

    def fill(seed: int) -> None:
        torch.manual_seed(seed)
        for source in sources[:-1]:
            source.copy_(torch.randn(source.shape, device=CUDA))
        slots.copy_(torch.randperm(128, device=CUDA)[:rows])
        caches.zero_()

    fill(0)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        fill(seed)
        eager = [t.clone() for t in (*step(), residual, qkv[:, :8], caches)]
        fill(seed)
        graph.replay()
        for ours, theirs in zip((*captured, residual, qkv[:, :8], caches), eager, strict=True):
            assert torch.equal(ours, theirs)


def test_float32_stays_with_torch() -> None:
    assert _with_elementwise(REFERENCE, torch.float32, CUDA) is REFERENCE
