"""A linear layer's product in C (``csrc/linear.c``) for float32 and the few rows of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from punica_batch_kernels.native.build import Library
from punica_batch_kernels.products import reference

_PANEL = 64  # as in the C source
# Beyond this many rows a BLAS's packing of the weights has paid for itself.
MAX_ROWS = 256


class NativeLinear:
    """``linear`` as ``torch.nn.functional.linear``, ``add_linear`` as ``products.reference.add_linear``; a row's result
    does not depend on the other rows nor on threads.

    Keeps a buffer: not for several threads at once.
    """

    def __init__(self, library: Library) -> None:
        self._threads = library.threads
        self._kernel = library.function("linear", "plpppllllpl") if library.flag("has_linear") else None
        self._panels = torch.empty(0)

    @property
    def is_available(self) -> bool:
        """Whether the processor is one that the kernel is made for."""
        return self._kernel is not None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._fits(x, weight):
            return functional.linear(x, weight, bias)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        self._run(out, x, weight, bias, accumulate=False)
        return out

    def add_linear(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if self._fits(x, weight) and y.dtype == torch.float32 and y.stride(1) == 1:
            self._run(y, x, weight, bias, accumulate=True)
        else:
            reference.add_linear(y, x, weight, bias)

    def _fits(self, x: Tensor, weight: Tensor) -> bool:
        fits = x.dtype == weight.dtype == torch.float32 and x.stride(1) == 1 and weight.is_contiguous()
        return self.is_available and fits and x.shape[0] <= MAX_ROWS

    def _run(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, accumulate: bool) -> None:
        assert self._kernel is not None
        rows, size = x.shape
        room = -(-rows // _PANEL) * _PANEL * size
        if room > self._panels.numel():
            self._panels = torch.empty(room, dtype=x.dtype)
        self._kernel(
            x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            y.stride(0), rows, size, weight.shape[0], self._panels.data_ptr(), accumulate, *self._threads(),
        )  # fmt: skip
