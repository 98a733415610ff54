"""A linear layer with adapters: in which order, and on which streams, the base product and the add-on run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from punica_batch_kernels.sgmv.triton_backend import add_lora, empty_v, has_tiles, sgmv_expand, sgmv_shrink
from punica_batch_kernels.sgmv.types import LoraGroup, Segments

Base = Callable[[Tensor], Tensor]
AddBase = Callable[[Tensor, Tensor], Tensor]

# Up to as many rows the base product leaves the tensor cores and some of the launch latency to others: measured.
MAX_FEW = 64
# Up to as many rows y stays in the cache; beyond, what counts is how often it is read and written.
MAX_CACHED = 512


class OrderedLinear:
    """What ``base(x)`` returns, [T, out], with the adapters of a group added to it; on one CUDA device. It is a new
    tensor, or an older one that ``base`` adds its product to, such as the residual stream.

    While a graph is captured, few rows take ``side_by_side``: a replay pays nothing for the fork, which on the eager
    path would cost the host more than the shrink takes. Outside of graphs, many rows take ``base_last``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(
        self, base: Base, x: Tensor, group: LoraGroup, segments: Segments, add_base: AddBase | None = None
    ) -> Tensor:
        """``add_base(y, x)``: adds to y what ``base`` puts into a new tensor, and returns y; None where ``base`` itself
        adds to an older one, or such a sum is not to be had."""
        rows = x.shape[0]
        if has_tiles(segments):
            if rows <= MAX_FEW and torch.cuda.is_current_stream_capturing():
                return self.side_by_side(base, x, group, segments)
            # not in a graph, whose replays have other base rows than its capture
            if rows > MAX_CACHED and add_base is not None and not torch.cuda.is_current_stream_capturing():
                return base_last(add_base, x, group, segments)
        return base_first(base, x, group, segments)

    def side_by_side(self, base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        """The shrink on a stream of its own beside the base product, joined before the expand.

        All tensors belong to the current stream and outlive the join, so none can be given away meanwhile.
        """
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


def base_first(base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
    """The base product, then the add-on."""
    y = base(x)
    add_lora(y, x, group, segments)
    return y


def base_last(add_base: AddBase, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
    """The add-on written, then the base product summed onto it, which reads what it adds to at next to no cost: y is
    read once less."""
    v = empty_v(x, group, segments)
    sgmv_shrink(v, x, group, segments)
    # rows with adapters are in one tile each and written there, whatever they held; base rows are in none
    new = torch.zeros if -1 in segments.lora_indices else torch.empty
    y = new(x.shape[0], group.out_offsets[-1], dtype=x.dtype, device=x.device)
    sgmv_expand(y, v, group, segments, accumulate=False)
    return add_base(y, x)
