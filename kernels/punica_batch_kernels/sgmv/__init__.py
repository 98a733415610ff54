"""SGMV: the adapters' part of a linear layer, y += (x A.T) B.T, for rows grouped by adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from punica_batch_kernels.elementwise.types import Rotation
from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.types import LoraGroup, Segments


class AddLora(Protocol):
    def __call__(
        self, y: Tensor, x: Tensor, group: LoraGroup, segments: Segments, buffer: Tensor | None = None
    ) -> None: ...


class LoraLinear(Protocol):
    """What ``base(x)`` returns, [T, out], with the adapters of ``group`` added to it in place: a new tensor, or
    an older one that ``base`` has added its product to."""

    def __call__(self, base: Callable[[Tensor], Tensor], x: Tensor, group: LoraGroup, segments: Segments) -> Tensor: ...


class FusedProducts(Protocol):
    """A layer's wide products with adapters and what follows them, for segments with ``all_rows``: large prefills. The
    KV cache is of the model's dtype."""

    def rope_and_write_kv(
        self,
        base: Callable[[Tensor], Tensor],
        x: Tensor,
        group: LoraGroup,
        segments: Segments,
        rotation: Rotation,
    ) -> Tensor:
        """``base(x)`` with the adapters added as [T, heads, head_dim], after ``elementwise.types.RopeAndWriteKV``."""
        ...

    def silu_and_mul(self, base: Callable[[Tensor], Tensor], x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        """silu(gate) * up of ``base(x)`` with the adapters added."""
        ...


@dataclass(frozen=True, slots=True)
class SgmvBackend:
    """The functions' meanings are those of ``sgmv.reference``.

    ``lora_linear``: where the backend has more to offer than the base product and then ``add_lora``;
    ``captured_lora_linear``: what that does for few rows while a graph is captured, which may be other kernels.
    """

    name: str
    sgmv_shrink: Callable[[Tensor, Tensor, LoraGroup, Segments], None]
    sgmv_expand: Callable[[Tensor, Tensor, LoraGroup, Segments], None]
    add_lora: AddLora
    lora_linear: LoraLinear | None = None
    captured_lora_linear: LoraLinear | None = None
    fused: FusedProducts | None = None


def backend_for(device: torch.device) -> SgmvBackend:
    """Triton on CUDA devices, plain torch elsewhere. Triton is imported only where it is used."""
    if device.type == "cuda":
        from punica_batch_kernels.sgmv import triton_backend as triton
        from punica_batch_kernels.sgmv.linear import OrderedLinear, TritonFusedProducts

        ordered = OrderedLinear(device)
        return SgmvBackend(
            "triton", triton.sgmv_shrink, triton.sgmv_expand, triton.add_lora, ordered, ordered.side_by_side,
            TritonFusedProducts(),
        )  # fmt: skip
    return SgmvBackend("reference", reference.sgmv_shrink, reference.sgmv_expand, reference.add_lora)
