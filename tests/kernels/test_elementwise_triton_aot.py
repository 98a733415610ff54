"""The rotation's and the sampler's kernels compile for an A100 and an H100, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from aot import A100_SHARED_MEMORY, NEEDS_COMPILER, Launch, compile_for
from punica_batch_kernels.elementwise import triton_rope
from punica_batch_kernels.elementwise.types import QKNorm, Rotation
from punica_batch_kernels.sampling import triton_backend
from punica_batch_kernels.sampling.types import DrawParams

pytestmark = NEEDS_COMPILER


class Recorder:
    """Stands for a kernel and keeps what it was launched with."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def compile_all(launches: list[Launch], capability: int) -> list[str]:
    compiled = [compile_for(capability, *launch) for launch in launches]
    assert all(c.metadata.shared <= A100_SHARED_MEMORY for c in compiled)
    texts = [c.asm["ptx"] for c in compiled]
    assert not any("ld.local" in text for text in texts)
    return texts


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sampling_compiles(dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []
    for name in ("argmax_split_kernel", "argmax_join_kernel", "draw_kernel"):
        monkeypatch.setattr(triton_backend, name, Recorder(getattr(triton_backend, name), launches))
    logits = torch.zeros(4, 128_256, dtype=dtype)
    found = triton_backend.greedy(logits)
    params = DrawParams(torch.zeros(4, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.float64))
    triton_backend.draw(logits, found, params, span=26.1)
    split, join, draw = compile_all(launches, capability)
    assert "f64" not in split + join
    assert "div.rn.f64" in draw, "scores are divided as torch divides them"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_compiles(head_dim: int, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(
        triton_rope, "rope_and_write_kv_kernel", Recorder(triton_rope.rope_and_write_kv_kernel, launches)
    )
    cache, angles = torch.zeros(4, 16, 8, head_dim, dtype=dtype), torch.zeros(3, 1, head_dim // 2)
    qkv, slots = torch.zeros(3, 48, head_dim, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    for norm in (None, QKNorm(qkv[0, 0], qkv[0, 0], 1e-6)):
        triton_rope.rope_and_write_kv(qkv, Rotation(32, norm, angles, angles, cache, cache, slots))
    texts = compile_all(launches, capability)
    assert "sqrt.rn" not in texts[0]
    assert "sqrt.rn" in texts[1]
    if head_dim != 80:
        assert all("ld.global.b16" not in text.replace("::", ".") for text in texts), "heads load 16 bytes at a time"
