"""Norms of heads, rotation and cache writes against float64, for the kernel that does all of it."""

from __future__ import annotations

import math

import torch
from punica_batch_kernels.elementwise.types import QKNorm, RopeAndWriteKV, Rotation
from torch import Tensor

BLOCK = 16


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    return torch.cat((turned.real, turned.imag), dim=-1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def check_rope_and_write_kv(
    function: RopeAndWriteKV, rows: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str, *,
    norm: bool,
) -> None:  # fmt: skip
    """Rows of a wider tensor, scattered slots, caches that are NaN and strided by block."""
    torch.manual_seed(rows)
    num_heads, kv_heads = heads
    width = (num_heads + 2 * kv_heads) * head_dim
    wide = torch.full((rows, width + 16), math.nan, dtype=dtype, device=device)
    qkv = wide[:, :width].copy_(torch.randn(rows, width)).view(rows, num_heads + 2 * kv_heads, head_dim)
    before = qkv.clone()
    angles = torch.randn(rows, 1, head_dim // 2, device=device) * 100
    blocks = rows // BLOCK + 2
    shape = (blocks, 2, BLOCK, kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, math.nan, dtype=dtype, device=device).unbind(1)
    slots = torch.randperm(blocks * BLOCK)[:rows].to(device)
    weights = QKNorm(*(torch.randn(head_dim, device=device).to(dtype) for _ in range(2)), 1e-6) if norm else None
    function(qkv, Rotation(num_heads, weights, angles.cos(), angles.sin(), k_cache, v_cache, slots))

    q, k, v = before.split_with_sizes([num_heads, kv_heads, kv_heads], dim=1)
    want_q = normed(q, weights.q_weight, 1e-6) if weights else q
    want_k = normed(k, weights.k_weight, 1e-6) if weights else k
    stored = [cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache)]
    # rounded once: half a unit in the last place, and float32's own errors
    close = {"rtol": 0.51 * torch.finfo(dtype).eps + 1e-6, "atol": 2e-5}
    torch.testing.assert_close(qkv[:, :num_heads].double(), rotated(want_q, angles), **close)
    torch.testing.assert_close(stored[0].double(), rotated(want_k, angles), **close)
    assert torch.equal(stored[1], v)
    for cache in (k_cache, v_cache):
        assert int(cache.isnan().flatten(2).any(-1).sum()) == blocks * BLOCK - rows, "no other slot is written"
    assert wide[:, width:].isnan().all()
