"""A linear layer's product in C (``csrc/linear.c``) for float32 and the few rows of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from punica_batch_kernels.native.build import Library

_PANEL = 64  # as in the C source
# Beyond this many rows a BLAS's packing of the weights has paid for itself.
MAX_ROWS = 256


class NativeLinear:
    """``linear`` as ``torch.nn.functional.linear``; a row's result does not depend on the other rows nor on threads.

    Keeps a buffer: not for several threads at once.
    """

    def __init__(self, library: Library) -> None:
        self._threads = library.threads
        self._kernel = library.function("linear", "plpppllllp") if library.flag("has_linear") else None
        self._panels = torch.empty(0)

    @property
    def is_available(self) -> bool:
        """Whether the processor is one that the kernel is made for."""
        return self._kernel is not None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, size = x.shape
        fits = x.dtype == weight.dtype == torch.float32 and x.stride(1) == 1 and weight.is_contiguous()
        if self._kernel is None or not fits or rows > MAX_ROWS:
            return functional.linear(x, weight, bias)
        room = -(-rows // _PANEL) * _PANEL * size
        if room > self._panels.numel():
            self._panels = torch.empty(room, dtype=x.dtype)
        out = torch.empty(rows, weight.shape[0], dtype=x.dtype)
        self._kernel(
            x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            out.stride(0), rows, size, weight.shape[0], self._panels.data_ptr(), *self._threads(),
        )  # fmt: skip
        return out
