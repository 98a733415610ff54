"""An adapter's tensors as the kernels take them: one packed buffer, fused groups as views into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from punica_batch_kernels.sgmv.types import LoraGroup, SlotWeights
from torch import Tensor

from punica_batch.adapters.peft import (
    LoadedAdapter,
    LoraTensors,
    bind_adapter,
    check_base_layers,
    inspect_adapter,
    load_adapter,
)
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import AdapterError
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import FUSED_PROJECTIONS, ModelLora

EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"
# Each matrix begins at a multiple of this many elements: 128 bytes or more, as tensor cores and vector loads like it.
_ALIGN = 64


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """``groups``: one entry for each of ``fused_modules``, None where the adapter does not touch it. ``embedding``: its
    (A [rank, vocab], B [hidden, rank]). All are views of ``buffer``, of the model's dtype; scales are folded into B,
    which is stored rank by rank (its transpose is contiguous), as the device kernels read it."""

    sha256: str
    buffer: Tensor
    groups: tuple[SlotWeights | None, ...]
    embedding: tuple[Tensor, Tensor] | None

    def to(self, device: torch.device) -> PackedAdapter:
        """The same on ``device``, in one copy; itself where it is there already."""
        if self.buffer.device.type == device.type:
            return self
        flat = _upload(self.buffer, device) if device.type == "cuda" else self.buffer.to(device)

        def moved(view: Tensor) -> Tensor:
            return flat.as_strided(view.shape, view.stride(), view.storage_offset())

        groups = tuple(
            g and SlotWeights(moved(g.a), tuple(None if b is None else moved(b) for b in g.b), g.ranks)
            for g in self.groups
        )
        embedding = self.embedding and (moved(self.embedding[0]), moved(self.embedding[1]))
        return PackedAdapter(self.sha256, flat, groups, embedding)


def fused_modules(num_layers: int) -> list[tuple[str, ...]]:
    """The modules of each fused group, slice by slice, in the order of ``groups_of``."""
    fused = FUSED_PROJECTIONS.values()
    layers = [tuple(f"model.layers.{i}.{name}" for name in names) for i in range(num_layers) for names in fused]
    return [*layers, (LM_HEAD,)]


def groups_of(model_lora: ModelLora) -> list[LoraGroup]:
    """Every fused group of the model."""
    layers = [getattr(layer, name) for layer in model_lora.layers for name in FUSED_PROJECTIONS]
    return [*layers, model_lora.lm_head]


def install(model_lora: ModelLora, slot: int, packed: PackedAdapter) -> None:
    """Puts an adapter's weights into a slot."""
    for group, weights in zip(groups_of(model_lora), packed.groups, strict=True):
        group.slots[slot] = weights
    model_lora.embeddings[slot] = packed.embedding


def clear(model_lora: ModelLora, slot: int) -> None:
    """Leaves nothing in a slot."""
    for group in groups_of(model_lora):
        group.slots[slot] = None
    model_lora.embeddings[slot] = None


def pack_adapter(adapter: LoadedAdapter, num_layers: int, dtype: torch.dtype, device: torch.device) -> PackedAdapter:
    """Stacks a group's A, folds the scale into each B (in float32) and converts, at each matrix's true rank.

    Raises ``AdapterError`` when a value overflows ``dtype``.
    """
    modules = adapter.modules
    fused = fused_modules(num_layers)
    tensors = [modules[name] for names in (*fused, (EMBEDDING,)) for name in names if name in modules]
    size = sum(_padded(t.a.size) + _padded(t.b.size) for t in tensors)
    buffer = _Buffer(torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda"))
    groups = tuple(_group(buffer, [modules.get(name) for name in names]) for names in fused)
    embedding = modules.get(EMBEDDING)
    packed_embedding = None if embedding is None else (buffer.stack([embedding]), buffer.scaled_b(embedding))
    packed = PackedAdapter(adapter.sha256, buffer.flat, groups, packed_embedding).to(device)
    if not bool(torch.isfinite(packed.buffer).all()):
        raise AdapterError(f"adapter {adapter.name!r}: its weights overflow {str(dtype).removeprefix('torch.')}")
    return packed


def adapter_loader(settings: EngineSettings, model: LlamaModel) -> Callable[[str], PackedAdapter]:
    """What ``LoraStore`` runs on its threads: files → checked tensors → packed buffer."""
    shapes = model.config.lora_modules()
    base = {EMBEDDING: model.embed_tokens, LM_HEAD: model.lm_head.weight}

    def load(lora_id: str) -> PackedAdapter:
        files = inspect_adapter(settings.adapters[lora_id], settings.storage_options)
        if files.max_rank > settings.max_lora_rank:
            raise AdapterError(
                f"adapter {lora_id!r}: its rank is {files.max_rank}, and this engine was made for ranks up to "
                f"{settings.max_lora_rank}: raise max_lora_rank"
            )
        adapter = load_adapter(files, bind_adapter(files, shapes))
        _check_base_copies(adapter, base)
        return pack_adapter(adapter, model.config.num_hidden_layers, model.dtype, model.device)

    return load


class _Buffer:
    """Hands out aligned views of one flat tensor, in order."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._used = 0

    def _take(self, rows: int, columns: int) -> Tensor:
        start, self._used = self._used, self._used + _padded(rows * columns)
        return self.flat[start : start + rows * columns].view(rows, columns)

    def stack(self, tensors: Sequence[LoraTensors]) -> Tensor:
        """The A matrices one under another, [sum of ranks, in]."""
        a = self._take(sum(t.a.shape[0] for t in tensors), tensors[0].a.shape[1])
        row = 0
        for t in tensors:
            a[row : row + t.a.shape[0]].copy_(torch.from_numpy(t.a))
            row += t.a.shape[0]
        return a

    def scaled_b(self, tensors: LoraTensors) -> Tensor:
        """scale * B, [out, rank], stored rank by rank."""
        out, rank = tensors.b.shape
        return self._take(rank, out).t().copy_(torch.from_numpy(tensors.b).float() * tensors.scale)


def _upload(buffer: Tensor, device: torch.device) -> Tensor:
    """A pinned buffer's copy on the device, made beside whatever runs there; this thread alone waits for it."""
    flat = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # the memory may have been another tensor's, which steps that are still enqueued read
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        flat.copy_(buffer, non_blocking=True)
    stream.synchronize()
    return flat


def _padded(elements: int) -> int:
    return -(-elements // _ALIGN) * _ALIGN


def _group(buffer: _Buffer, slices: Sequence[LoraTensors | None]) -> SlotWeights | None:
    present = [t for t in slices if t is not None]
    if not present:
        return None
    return SlotWeights(
        a=buffer.stack(present),
        b=tuple(None if t is None else buffer.scaled_b(t) for t in slices),
        ranks=tuple(0 if t is None else t.a.shape[0] for t in slices),
    )


def _check_base_copies(adapter: LoadedAdapter, base: Mapping[str, Tensor]) -> None:
    """PEFT saves whole base layers beside adapted embeddings: they must be the base model's own, but for rounding."""
    if not adapter.base_layers:
        return
    dtypes = {base[module].dtype for module in adapter.base_layers}
    copies = list(adapter.base_layers.values())
    rtol = 0.0
    if torch.float16 in dtypes or any(copy.dtype == np.float16 for copy in copies):
        rtol = 2.0**-11
    # bfloat16 is delivered as float32 whose lower halves are zero
    if torch.bfloat16 in dtypes or any(
        c.dtype == np.float32 and not (c.view(np.uint32) & 0xFFFF).any() for c in copies
    ):
        rtol = 2.0**-8
    check_base_layers(adapter, lambda module: base[module].float().cpu().numpy(), rtol=rtol)
