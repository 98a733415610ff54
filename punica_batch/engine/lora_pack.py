"""An adapter's tensors as the kernels take them: one packed buffer, fused groups as views into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.types import LoraGroup, SlotWeights
from torch import Tensor

from punica_batch.adapters.digest import DigestCache
from punica_batch.adapters.peft import AdapterFiles, LoraModule, bind_adapter, inspect_adapter
from punica_batch.adapters.weights import LoadedAdapter, LoraTensors, check_base_layers, load_adapter
from punica_batch.engine.lora_layout import EMBEDDING, LM_HEAD, fused_modules, padded
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import AdapterError
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import FUSED_PROJECTIONS, ModelLora


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """``groups``: one entry for each of ``fused_modules``, None where the adapter does not touch it. ``embedding``: its
    (A [rank, vocab], B [hidden, rank]). All are views of ``buffer``, of the model's dtype; scales are folded into B,
    which is stored rank by rank (its transpose is contiguous), as the device kernels read it."""

    sha256: str
    buffer: Tensor
    groups: tuple[SlotWeights | None, ...]
    embedding: tuple[Tensor, Tensor] | None

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    @property
    def bytes_copied(self) -> int:
        """Nothing goes to another device."""
        return 0

    def install(self, model_lora: ModelLora, slot: int, tables: SlotTables | None) -> None:
        """Puts the weights into a slot."""
        for group, weights in zip(groups_of(model_lora), self.groups, strict=True):
            group.slots[slot] = weights
        model_lora.embeddings[slot] = self.embedding
        if tables is not None:
            tables.install(slot)

    def uninstall(self, model_lora: ModelLora, slot: int, tables: SlotTables | None) -> None:
        """Leaves nothing in the slot."""
        for group in groups_of(model_lora):
            group.slots[slot] = None
        model_lora.embeddings[slot] = None
        if tables is not None:
            tables.install(slot)

    def release(self, *, was_installed: bool) -> None:
        """Nothing to give back: who holds a view keeps the buffer."""


def groups_of(model_lora: ModelLora) -> list[LoraGroup]:
    """Every fused group of the model."""
    layers = [getattr(layer, name) for layer in model_lora.layers for name in FUSED_PROJECTIONS]
    return [*layers, model_lora.lm_head]


def pack_adapter(adapter: LoadedAdapter, num_layers: int, dtype: torch.dtype) -> PackedAdapter:
    """Stacks a group's A, folds the scale into each B (in float32) and converts, at each matrix's true rank; as
    ``lora_layout.adapter_layout`` says.

    Raises ``AdapterError`` when a value overflows ``dtype``.
    """
    modules = adapter.modules
    fused = fused_modules(num_layers)
    tensors = [modules[name] for names in (*fused, (EMBEDDING,)) for name in names if name in modules]
    size = sum(padded(t.a.size) + padded(t.b.size) for t in tensors)
    buffer = _Buffer(torch.zeros(size, dtype=dtype))
    groups = tuple(_group(buffer, [modules.get(name) for name in names]) for names in fused)
    embedding = modules.get(EMBEDDING)
    packed_embedding = None if embedding is None else (buffer.stack([embedding]), buffer.scaled_b(embedding))
    packed = PackedAdapter(adapter.sha256, buffer.flat, groups, packed_embedding)
    if not bool(torch.isfinite(packed.buffer).all()):
        raise overflows(adapter.name, dtype)
    return packed


def adapter_loader(
    settings: EngineSettings, model: LlamaModel, digests: DigestCache | None = None
) -> Callable[[str], PackedAdapter]:
    """What ``LoraStore`` runs on its threads for a model in host memory: files → checked tensors → packed buffer.
    Every load digests what it reads; ``digests`` are told."""
    shapes = model.config.lora_modules()

    def load(lora_id: str) -> PackedAdapter:
        files = inspect_adapter(settings.adapters[lora_id], settings.storage_options)
        check_rank(files, settings.max_lora_rank)
        return pack_files(files, bind_adapter(files, shapes), model, digests)

    return load


def pack_files(
    files: AdapterFiles, bound: Mapping[str, LoraModule], model: LlamaModel, digests: DigestCache | None = None
) -> PackedAdapter:
    """Reads the weights and packs them in host memory. Raises ``AdapterError`` or ``StoreAway``."""
    adapter = load_adapter(files, bound, digests)
    _check_base_copies(adapter, {EMBEDDING: model.embed_tokens, LM_HEAD: model.lm_head.weight})
    return pack_adapter(adapter, model.config.num_hidden_layers, model.dtype)


def check_rank(files: AdapterFiles, max_lora_rank: int) -> None:
    """Raises ``AdapterError`` for an adapter that the engine's buffers were not made for."""
    if files.max_rank > max_lora_rank:
        raise AdapterError(
            f"adapter {files.spec.name!r}: its rank is {files.max_rank}, and this engine was made for ranks up to "
            f"{max_lora_rank}: raise max_lora_rank"
        )


def overflows(name: str, dtype: torch.dtype) -> AdapterError:
    return AdapterError(f"adapter {name!r}: its weights overflow {str(dtype).removeprefix('torch.')}")


class _Buffer:
    """Hands out aligned views of one flat tensor, in order."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._used = 0

    def _take(self, rows: int, columns: int) -> Tensor:
        start, self._used = self._used, self._used + padded(rows * columns)
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
    check_base_layers(adapter, lambda module: base[module].cpu().float().numpy(), rtol=rtol)
