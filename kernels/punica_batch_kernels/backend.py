"""One set of kernels behind one interface, so that a model does not know which backend runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from punica_batch_kernels.attention import reference as attention_reference
from punica_batch_kernels.attention.types import AttentionMetadata
from punica_batch_kernels.sgmv import reference as sgmv_reference
from punica_batch_kernels.sgmv.types import LoraGroup, Segments


class AddLora(Protocol):
    def __call__(
        self, y: Tensor, x: Tensor, group: LoraGroup, segments: Segments, buffer: Tensor | None = None
    ) -> None: ...


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
    """The functions' meanings are those of ``sgmv.reference`` and ``attention.reference``."""

    add_lora: AddLora
    write_kv: WriteKV
    plan_attention: PlanAttention
    paged_attention: PagedAttention


REFERENCE = Kernels(
    add_lora=sgmv_reference.add_lora,
    write_kv=attention_reference.write_kv,
    plan_attention=attention_reference.plan_attention,
    paged_attention=attention_reference.paged_attention,
)
