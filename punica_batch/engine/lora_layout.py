"""Where each matrix of an adapter's file goes in its packed buffer: worked out once for all adapters of one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from punica_batch_kernels.packing.types import Move
from punica_batch_kernels.sgmv.slot_table import GroupLayout

from punica_batch.adapters.header import ITEM_BYTES, TensorInfo
from punica_batch.adapters.peft import AdapterFiles, LoraModule, base_copies
from punica_batch.models.lora import FUSED_PROJECTIONS

EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"
# Each matrix begins at a multiple of this many elements: 128 bytes or more, as tensor cores and vector loads like it.
ALIGN = 64

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """As ``GroupLayout``, for the embedding: A [rank, vocab] and B's transpose [rank, hidden]."""

    a: int
    b: int
    rank: int
    vocab: int
    hidden: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """``size``: elements of the packed buffer. ``groups``: one entry for each of ``fused_modules``.

    ``moves``: from the file's data into it; None where only the host can do it: copies of base layers have to be
    compared with the model's, and tensors that do not begin at a multiple of their elements' size cannot be addressed.
    """

    size: int
    groups: tuple[GroupLayout | None, ...]
    embedding: EmbeddingLayout | None
    moves: tuple[Move, ...] | None


def fused_modules(num_layers: int) -> list[tuple[str, ...]]:
    """The modules of each fused group, slice by slice, in the order of ``groups_of``."""
    fused = FUSED_PROJECTIONS.values()
    layers = [tuple(f"model.layers.{i}.{name}" for name in names) for i in range(num_layers) for names in fused]
    return [*layers, (LM_HEAD,)]


def padded(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


def adapter_layout(files: AdapterFiles, bound: Mapping[str, LoraModule], num_layers: int) -> AdapterLayout:
    """The layout in which ``pack_adapter`` packs, too: group by group, A's slices stacked, then each B by ranks."""
    builder = _Builder(files.header)
    groups = tuple(builder.group([bound.get(name) for name in names]) for names in fused_modules(num_layers))
    embedding = None
    if (module := bound.get(EMBEDDING)) is not None:
        a, b = builder.stack([module]), builder.transposed(module)
        vocab, hidden = files.header[module.a_name].shape[1], files.header[module.b_name].shape[0]
        embedding = EmbeddingLayout(a, b, module.rank, vocab, hidden)
    by_host = bool(base_copies(files)) or not builder.is_addressable
    return AdapterLayout(builder.used, groups, embedding, None if by_host else tuple(builder.moves))


class _Builder:
    """Hands out places in order and notes what goes there."""

    def __init__(self, header: Mapping[str, TensorInfo]) -> None:
        self._header = header
        self.moves: list[Move] = []
        self.used = 0
        self.is_addressable = True

    def group(self, slices: Sequence[LoraModule | None]) -> GroupLayout | None:
        present = [module for module in slices if module is not None]
        if not present:
            return None
        return GroupLayout(
            a=self.stack(present),
            b=tuple(None if module is None else self.transposed(module) for module in slices),
            ranks=tuple(0 if module is None else module.rank for module in slices),
        )

    def stack(self, modules: Sequence[LoraModule]) -> int:
        start = target = self.used
        for module in modules:
            target += self._move(module.a_name, target)
        self.used += padded(target - start)
        return start

    def transposed(self, module: LoraModule) -> int:
        start = self.used
        self.used += padded(self._move(module.b_name, start, transposed=True, scale=module.scale))
        return start

    def _move(self, name: str, target: int, *, transposed: bool = False, scale: float = 1.0) -> int:
        info = self._header[name]
        source, rest = divmod(info.begin, ITEM_BYTES[info.dtype])
        self.is_addressable &= rest == 0
        move = Move(_DTYPES[info.dtype], source, target, info.shape[0], info.shape[1], transposed, scale)
        self.moves.append(move)
        return move.size
