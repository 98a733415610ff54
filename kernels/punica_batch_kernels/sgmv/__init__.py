"""SGMV: the adapters' part of a linear layer, y += (x A.T) B.T, for rows grouped by adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.types import LoraGroup, Segments


class AddLora(Protocol):
    def __call__(
        self, y: Tensor, x: Tensor, group: LoraGroup, segments: Segments, buffer: Tensor | None = None
    ) -> None: ...


class LoraLinear(Protocol):
    """What ``base(x)`` returns, [T, out], with the adapters of ``group`` added to it in place.

    It is a new tensor, or an older one that ``base`` has added its product to. ``add_base(y, x)``: adds to y in place
    what ``base`` puts into a new tensor, and returns y, for backends that would have the adapters' part there first;
    None: ``base`` is to be called.
    """

    def __call__(
        self,
        base: Callable[[Tensor], Tensor],
        x: Tensor,
        group: LoraGroup,
        segments: Segments,
        add_base: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SgmvBackend:
    """The functions' meanings are those of ``sgmv.reference``.

    ``lora_linear``: where the backend has more to offer than the base product and then ``add_lora``.
    """

    name: str
    sgmv_shrink: Callable[[Tensor, Tensor, LoraGroup, Segments], None]
    sgmv_expand: Callable[[Tensor, Tensor, LoraGroup, Segments], None]
    add_lora: AddLora
    lora_linear: LoraLinear | None = None


def backend_for(device: torch.device) -> SgmvBackend:
    """Triton on CUDA devices, plain torch elsewhere. Triton is imported only where it is used."""
    if device.type == "cuda":
        from punica_batch_kernels.sgmv import triton_backend as triton
        from punica_batch_kernels.sgmv.linear import OrderedLinear

        return SgmvBackend("triton", triton.sgmv_shrink, triton.sgmv_expand, triton.add_lora, OrderedLinear(device))
    return SgmvBackend("reference", reference.sgmv_shrink, reference.sgmv_expand, reference.add_lora)
