"""Norms, rotary embedding, activation and the KV cache's writes in C (``csrc/elementwise.c``), for float32.

The meanings are those of ``elementwise.reference``; other dtypes and layouts go there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from punica_batch_kernels.attention import reference as attention_reference
from punica_batch_kernels.elementwise import reference
from punica_batch_kernels.native.build import Library


class NativeElementwise:
    def __init__(self, library: Library) -> None:
        self._threads = library.threads
        self._rms_norm = library.function("rms_norm", "pllllpllplf")
        self._apply_rope = library.function("apply_rope", "pllllppl")
        self._silu_and_mul = library.function("silu_and_mul", "pllpl")
        self._write_kv = library.function("write_kv", "plplpppll", threads=False)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        if not (_fits(x) and x.dim() <= 3 and (out is None or _fits(out))):
            return reference.rms_norm(x, weight, eps, out)
        result = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        outer, outer_stride, inner, inner_stride = _rows(x)
        self._rms_norm(
            x.data_ptr(), outer, outer_stride, inner, inner_stride, result.data_ptr(), *_rows(result)[1::2],
            weight.data_ptr(), x.shape[-1], eps, *self._threads(),
        )  # fmt: skip
        return result

    def apply_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        if not (_fits(x) and cos.is_contiguous() and sin.is_contiguous()):
            reference.apply_rope(x, cos, sin)
            return
        rows, heads, head_dim = x.shape
        self._apply_rope(
            x.data_ptr(), rows, x.stride(0), heads, x.stride(1), cos.data_ptr(), sin.data_ptr(), head_dim // 2,
            *self._threads(),
        )  # fmt: skip

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if not _fits(gate_up):
            return reference.silu_and_mul(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype)
        self._silu_and_mul(gate_up.data_ptr(), rows, gate_up.stride(0), out.data_ptr(), size, *self._threads())
        return out

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        rows, kv_heads, head_dim = k.shape
        packed = k.stride(1) == head_dim and v.stride(1) == head_dim
        if not (packed and _fits(k) and _fits(v) and k_cache.dtype == torch.float32):
            attention_reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
            return
        self._write_kv(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_cache.data_ptr(), v_cache.data_ptr(),
            slot_mapping.data_ptr(), rows, kv_heads * head_dim,
        )  # fmt: skip


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.stride(-1) == 1


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """(count, stride) of the first dimension and of the one before the last, of at most three."""
    if x.dim() == 3:
        return x.shape[0], x.stride(0), x.shape[1], x.stride(1)
    return (x.shape[0], x.stride(0), 1, 0) if x.dim() == 2 else (1, 0, 1, 0)
