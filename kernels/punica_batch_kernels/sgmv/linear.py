"""A linear layer with adapters: in which order, and on which streams, the base product and the add-on run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from punica_batch_kernels.elementwise.types import Rotation
from punica_batch_kernels.sgmv import fused
from punica_batch_kernels.sgmv.tiles import MAX_FEW
from punica_batch_kernels.sgmv.triton_backend import add_lora, empty_v, has_tiles, sgmv_expand, sgmv_shrink
from punica_batch_kernels.sgmv.types import LoraGroup, Segments

Base = Callable[[Tensor], Tensor]


class OrderedLinear:
    """What ``base(x)`` returns, [T, out], with the adapters of a group added to it; on one CUDA device. It is a new
    tensor, or an older one that ``base`` adds its product to, such as the residual stream.

    While a graph is captured, few rows take ``side_by_side``: a replay pays nothing for the fork, which on the eager
    path would cost the host more than the shrink takes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        if x.shape[0] <= MAX_FEW and has_tiles(segments) and torch.cuda.is_current_stream_capturing():
            return self.side_by_side(base, x, group, segments)
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
        try:
            y = base(x)
        finally:  # a capture in which memory ran out can only be ended with its streams joined
            current.wait_stream(self._side)
        sgmv_expand(y, v, group, segments, dependent=False)
        return y


def base_first(base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
    """The base product, then the add-on."""
    y = base(x)
    add_lora(y, x, group, segments)
    return y


class TritonFusedProducts:
    """``FusedProducts`` by the kernels of ``fused``."""

    def rope_and_write_kv(
        self,
        base: Base,
        x: Tensor,
        group: LoraGroup,
        segments: Segments,
        rotation: Rotation,
    ) -> Tensor:
        y, v = _product_and_v(base, x, group, segments)
        qkv = y.view(y.shape[0], -1, rotation.k_cache.shape[3])
        fused.expand_rope_and_write_kv(qkv, v, group, segments, rotation)
        return qkv

    def silu_and_mul(self, base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        y, v = _product_and_v(base, x, group, segments)
        return fused.expand_silu(y, v, group, segments)


def _product_and_v(base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> tuple[Tensor, Tensor]:
    y, v = base(x), empty_v(x, group, segments)
    sgmv_shrink(v, x, group, segments)
    return y, v
