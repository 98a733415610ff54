"""What lies between a decoder's matrix products, in plain torch: norms, rotary embedding, activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from punica_batch_kernels.attention.reference import write_kv
from punica_batch_kernels.elementwise.types import RopeAndWriteKV, Rotation


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean in float32 (Zhang and Sennrich 2019, equation 4).

    ``x`` [..., n], of which all but the last dimension may be strided; ``out``: of x's shape, may be ``x``.
    It rounds where Hugging Face does: to x's dtype before the weight is multiplied.
    """
    if x.dtype == torch.float32:
        result = functional.rms_norm(x, weight.shape, weight, eps)
    else:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        result = weight * wide.to(x.dtype)
    return result if out is None else out.copy_(result)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates ``x`` [T, heads, head_dim] in place, first half against second (Hugging Face's layout).

    ``cos``, ``sin`` float32 [T, 1, head_dim / 2], contiguous; x may be strided but for its last dimension. They are
    rounded to x's dtype first, as Hugging Face does.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    rotated = (first * cos).addcmul_(second, sin, value=-1)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(rotated)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 m], gate first; [T, m]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def in_turn(
    rms_norm: Callable[..., Any], apply_rope: Callable[..., Any], write_kv: Callable[..., Any]
) -> RopeAndWriteKV:
    """``RopeAndWriteKV`` as one function after the other, where no kernel does all of it."""

    def rope_and_write_kv(qkv: Tensor, rotation: Rotation) -> None:
        num_heads, norm, cos, sin, k_cache, v_cache, slot_mapping = rotation
        kv_heads = k_cache.shape[2]
        q, k, v = qkv.split_with_sizes([num_heads, kv_heads, kv_heads], dim=1)
        if norm is not None:
            rms_norm(q, norm.q_weight, norm.eps, out=q)
            rms_norm(k, norm.k_weight, norm.eps, out=k)
        apply_rope(qkv[:, : num_heads + kv_heads], cos, sin)
        write_kv(k, v, k_cache, v_cache, slot_mapping)

    return rope_and_write_kv


rope_and_write_kv = in_turn(rms_norm, apply_rope, write_kv)
