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
from punica_batch_kernels.elementwise.flashinfer_backend import FlashInferElementwise
from punica_batch_kernels.elementwise.types import RopeAndWriteKV
from punica_batch_kernels.native.kernels import NativeKernels, load_native
from punica_batch_kernels.prebuild import build_missing
from punica_batch_kernels.products.reference import add_linear
from punica_batch_kernels.sgmv import AddLora, FusedProducts, LoraLinear, backend_for
from punica_batch_kernels.sgmv import reference as sgmv_reference
from punica_batch_kernels.sgmv.types import LoraGroup, Segments

# x [T, in], weight, bias or None to x W^T + b, as ``torch.nn.functional.linear``
ComputeLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# y [T, out], x, weight, bias or None: adds that to y in place, as ``products.reference.add_linear``
AddLinear = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]

_HALF = (torch.float16, torch.bfloat16)


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor: ...


class SiluAndMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor: ...


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
    """The functions' meanings are those of the ``reference`` modules of ``sgmv``, ``attention``, ``elementwise`` and
    ``products``.

    ``captured_lora_linear``: as ``SgmvBackend`` has it; ``lora_linear`` takes it by itself.
    ``capturable``: a CUDA graph can hold a step, all of whose host work is in ``plan_attention``.
    ``note``: one sentence where a slower backend than the device's best had to be taken.
    """

    add_lora: AddLora
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    linear: ComputeLinear = functional.linear
    add_linear: AddLinear = add_linear
    rms_norm: RmsNorm = elementwise_reference.rms_norm
    rope_and_write_kv: RopeAndWriteKV = elementwise_reference.rope_and_write_kv
    silu_and_mul: SiluAndMul = elementwise_reference.silu_and_mul
    ordered_lora_linear: LoraLinear | None = None
    captured_lora_linear: LoraLinear | None = None
    fused: FusedProducts | None = None
    capturable: bool = False
    note: str | None = None

    def lora_linear(
        self,
        base: Callable[[Tensor], Tensor],
        x: Tensor,
        group: LoraGroup,
        segments: Segments,
    ) -> Tensor:
        """``sgmv.LoraLinear``, in the order that the backend finds fastest."""
        if self.ordered_lora_linear is not None:
            return self.ordered_lora_linear(base, x, group, segments)
        y = base(x)
        self.add_lora(y, x, group, segments)
        return y


REFERENCE = Kernels(
    add_lora=sgmv_reference.add_lora,
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
    Triton, products of few rows too where that is faster than cuBLAS, and attention, norms and activation by FlashInfer
    where that is installed, can compile and has kernels for the model; else plain torch, and ``note`` says why.

    ``dtype``: of the model; ``kv_dtype``: of its KV cache (None: the same). ``cache``: the folder for what is compiled
    (None: nothing is).
    """
    if device.type != "cuda":
        native = load_native(cache) if cache is not None and dtype is torch.float32 else None
        return REFERENCE if native is None else _native(native, kv_dtype or dtype)
    from punica_batch_kernels.products.few_rows import FewRowsLinear

    sgmv, products = backend_for(device), FewRowsLinear(device)
    can_fuse = dtype in _HALF and kv_dtype in (None, dtype)
    kernels = replace(
        REFERENCE, add_lora=sgmv.add_lora, ordered_lora_linear=sgmv.lora_linear,
        captured_lora_linear=sgmv.captured_lora_linear, fused=sgmv.fused if can_fuse else None,
        linear=products, add_linear=products.add_to,
    )  # fmt: skip
    build_missing(attention, dtype, kv_dtype or dtype)
    attended = _with_attention(kernels, attention, dtype, kv_dtype or dtype, device)
    kernels = _with_elementwise(kernels, dtype, device)
    notes = [note for note in (attended.note, kernels.note) if note is not None]
    return replace(
        kernels, plan_attention=attended.plan_attention, paged_attention=attended.paged_attention,
        capturable=attended.capturable, note="; ".join(notes) or None,
    )  # fmt: skip


def _with_attention(
    kernels: Kernels, attention: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> Kernels:
    reason = flashinfer_backend.unsupported(attention, dtype, kv_dtype)
    if reason is None:
        try:
            backend = flashinfer_backend.FlashInferAttention(attention, dtype, device)
        except Exception as error:  # not installed, no compiler, a version of another mind: all of them leave torch
            reason = _first_line(error)
        else:
            return replace(kernels, plan_attention=backend.plan, paged_attention=backend.run, capturable=True)
    return replace(kernels, note=f"attention runs in plain torch, not by FlashInfer: {reason}")


def _with_elementwise(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Kernels:
    if dtype not in _HALF:
        return kernels
    from punica_batch_kernels.elementwise.triton_rope import rope_and_write_kv

    kernels = replace(kernels, rope_and_write_kv=rope_and_write_kv)
    try:
        with torch.cuda.device(device):
            backend = FlashInferElementwise(dtype, device)
    except Exception as error:
        note = f"norms and activation run in plain torch, not by FlashInfer: {_first_line(error)}"
        return replace(kernels, note=note)
    return replace(kernels, rms_norm=backend.rms_norm, silu_and_mul=backend.silu_and_mul)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _native(native: NativeKernels, kv_dtype: torch.dtype) -> Kernels:
    elementwise, attention = native.elementwise, native.attention
    kernels = replace(
        REFERENCE, add_lora=native.sgmv.add_lora, linear=native.linear.linear, add_linear=native.linear.add_linear,
        rms_norm=elementwise.rms_norm, silu_and_mul=elementwise.silu_and_mul,
        rope_and_write_kv=elementwise_reference.in_turn(
            elementwise.rms_norm, elementwise.apply_rope, elementwise.write_kv
        ),
    )  # fmt: skip
    if kv_dtype is not torch.float32:
        return kernels
    return replace(kernels, plan_attention=attention.plan, paged_attention=attention.run)
