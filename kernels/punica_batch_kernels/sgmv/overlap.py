"""A linear layer with adapters whose shrink runs beside the base product, on a second stream of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from punica_batch_kernels.sgmv.triton_backend import add_lora, empty_v, has_tiles, sgmv_expand, sgmv_shrink
from punica_batch_kernels.sgmv.types import LoraGroup, Segments

# Up to as many rows the base product leaves the tensor cores and some of the launch latency to others: measured.
MAX_ROWS = 64


class OverlappedLinear:
    """``base(x)``, a new tensor [T, out], with the adapters of a group added; on one CUDA device.

    While a graph is captured, few rows' shrink is forked onto a stream of its own and joined before the expand: a
    replay pays nothing for the fork, which on the eager path would cost the host more than the shrink takes. All
    tensors belong to the capturing stream and outlive the join, so none can be given away while the fork uses it.
    """

    def __init__(self, device: torch.device, max_rows: int = MAX_ROWS) -> None:
        self._device = device
        self._max_rows = max_rows

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, base: Callable[[Tensor], Tensor], x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        few = x.shape[0] <= self._max_rows and has_tiles(segments)
        if not (few and torch.cuda.is_current_stream_capturing()):
            y = base(x)
            add_lora(y, x, group, segments)
            return y
        current = torch.cuda.current_stream(x.device)
        v = empty_v(x, group, segments)
        self._side.wait_stream(current)
        # dependent launches are for a stream's own predecessor; these two wait for another stream's work
        with torch.cuda.stream(self._side):
            sgmv_shrink(v, x, group, segments, dependent=False)
        y = base(x)
        current.wait_stream(self._side)
        sgmv_expand(y, v, group, segments, dependent=False)
        return y
