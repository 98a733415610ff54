"""Norms and activation by FlashInfer's CUDA kernels, one launch each, compiled when the backend is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from punica_batch_kernels.elementwise import reference
from punica_batch_kernels.launch import has_pdl

# FlashInfer loads 16 bytes at a time.
_ALIGNMENT = 16


class FlashInferElementwise:
    """The functions mean what those of ``elementwise.reference`` do; a result is rounded once.

    ``dtype``: float16 or bfloat16. Raises whatever importing or compiling FlashInfer raises.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        from flashinfer.activation import get_act_and_mul_module
        from flashinfer.norm import get_norm_module

        # the modules and not the functions around them: those may compile anew for each width, in the middle of a step
        with ThreadPoolExecutor(2) as pool:  # both compile for a while where nothing is cached
            norm, activation = pool.submit(get_norm_module), pool.submit(get_act_and_mul_module, "silu")
            self._norm, self._silu_and_mul = norm.result(), activation.result().silu_and_mul
        x = torch.ones(1, 64, dtype=dtype, device=device)
        self._pdl = has_pdl(x.get_device())  # the kernel is there when the product before it ends
        self.silu_and_mul(self.rms_norm(x, x[0], 1e-5))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        if x.dim() != 2 or not _fits(x, x.shape[1]):
            return reference.rms_norm(x, weight, eps, out)
        result = torch.empty_like(x) if out is None else out
        self._norm.rmsnorm(result, x, weight, eps, self._pdl)
        return result

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if not (gate_up.is_contiguous() and _fits(gate_up, size)):
            return reference.silu_and_mul(gate_up)
        out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
        self._silu_and_mul(out, gate_up, self._pdl)
        return out


def _fits(x: Tensor, size: int) -> bool:
    """Whether there are rows, and their parts of ``size`` numbers are aligned."""
    return len(x) > 0 and x.stride(-1) == 1 and size * x.itemsize % _ALIGNMENT == 0 == x.data_ptr() % _ALIGNMENT
