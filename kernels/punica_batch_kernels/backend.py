"""One set of kernels behind one interface, so that a model does not know which backend runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from punica_batch_kernels.attention import flashinfer_backend
from punica_batch_kernels.attention import reference as attention_reference
from punica_batch_kernels.attention.types import AttentionMetadata, AttentionShape
from punica_batch_kernels.elementwise import reference as elementwise_reference
from punica_batch_kernels.native.kernels import NativeKernels, load_native
from punica_batch_kernels.sgmv import AddLora, backend_for
from punica_batch_kernels.sgmv import reference as sgmv_reference

# x [T, in], weight, bias or None to x W^T + b, as ``torch.nn.functional.linear``
ComputeLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class ApplyRope(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> None: ...


class SiluAndMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor: ...


class WriteKV(Protocol):
    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None: ...


class PlanAttention(Protocol):
    """Once a step and window; what it returns is the backend's own and goes back to its ``paged_attention``."""

    def __call__(self, meta: AttentionMetadata, block_size: int, *, window: int | None) -> Any: ...


class PagedAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        plan: Any = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions' meanings are those of ``sgmv.reference``, ``attention.reference`` and ``elementwise.reference``.

    ``note``: one sentence where a slower backend than the device's best had to be taken.
    """

    add_lora: AddLora
    write_kv: WriteKV
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    linear: ComputeLinear = functional.linear
    rms_norm: RmsNorm = elementwise_reference.rms_norm
    add_rms_norm: AddRmsNorm = elementwise_reference.add_rms_norm
    apply_rope: ApplyRope = elementwise_reference.apply_rope
    silu_and_mul: SiluAndMul = elementwise_reference.silu_and_mul
    note: str | None = None


REFERENCE = Kernels(
    add_lora=sgmv_reference.add_lora,
    write_kv=attention_reference.write_kv,
    plan_attention=attention_reference.plan_attention,
    paged_attention=attention_reference.paged_attention,
)


def kernels_for(
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionShape,
    kv_dtype: torch.dtype | None = None,
    cache: Path | None = None,
) -> Kernels:
    """On the CPU the kernels in C for float32, where a compiler is found; else plain torch. On CUDA devices SGMV by
    Triton, and attention by FlashInfer where that is installed, can compile and has kernels for the model; else plain
    torch, and ``note`` says why.

    ``dtype``: of the model; ``kv_dtype``: of its KV cache (None: the same). ``cache``: the folder for what is compiled
    (None: nothing is).
    """
    if device.type != "cuda":
        native = load_native(cache) if cache is not None and dtype is torch.float32 else None
        return REFERENCE if native is None else _native(native, kv_dtype or dtype)
    add_lora = backend_for(device).add_lora
    reason = flashinfer_backend.unsupported(attention, dtype, kv_dtype or dtype)
    if reason is None:
        try:
            backend = flashinfer_backend.FlashInferAttention(attention, dtype, device)
        except Exception as error:  # not installed, no compiler, a version of another mind: all of them leave torch
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            return Kernels(add_lora, attention_reference.write_kv, backend.plan, backend.run)
    return replace(REFERENCE, add_lora=add_lora, note=f"attention runs in plain torch, not by FlashInfer: {reason}")


def _native(native: NativeKernels, kv_dtype: torch.dtype) -> Kernels:
    elementwise, attention = native.elementwise, native.attention
    kernels = replace(
        REFERENCE, add_lora=native.sgmv.add_lora, linear=native.linear.linear, write_kv=elementwise.write_kv,
        rms_norm=elementwise.rms_norm, add_rms_norm=elementwise.add_rms_norm, apply_rope=elementwise.apply_rope,
        silu_and_mul=elementwise.silu_and_mul,
    )  # fmt: skip
    if kv_dtype is not torch.float32:
        return kernels
    return replace(kernels, plan_attention=attention.plan, paged_attention=attention.run)
