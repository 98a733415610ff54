"""An engine's adapter store, as its device wants it: how many threads load, how far ahead, into how many bytes."""

from __future__ import annotations

import os

import torch
from punica_batch_kernels.sgmv.slot_table import SlotTables
from torch import Tensor

from punica_batch.adapters.digest import DigestCache
from punica_batch.engine.lora_layout import ALIGN
from punica_batch.engine.lora_pack import adapter_loader, groups_of
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.lora_upload import DeviceLoader
from punica_batch.engine.settings import EngineSettings
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora

_MAX_THREADS = 16
# Of the memory that is free once the weights are there, where nobody has planned it.
_UNPLANNED_SHARE = 0.25
_LEAST_BYTES = 64 << 20
# Of each of the buffers that take files as they are; larger files make theirs grow.
_STAGING_BYTES = 96 << 20


def make_lora_store(settings: EngineSettings, model: LlamaModel) -> LoraStore:
    """An empty store for a model that is on the settings' device. On a GPU the adapters' memory is reserved here."""
    model_lora = ModelLora.empty(model.config, settings.max_loras)
    digests = DigestCache() if settings.trust_stamps else None
    if model.device.type != "cuda" or not settings.adapters:  # then nothing will be loaded
        loader = adapter_loader(settings, model, digests)
        return LoraStore(model_lora, loader, max_loras=settings.max_loras, read_ahead=settings.read_ahead)
    tables = SlotTables(groups_of(model_lora), settings.max_lora_rank, model.dtype, model.device)
    num_threads = loading_threads()
    read_ahead = max(settings.read_ahead, num_threads)
    memory = _reserve(settings, model, read_ahead)
    device_loader = DeviceLoader(
        settings, model, tables, memory, num_threads, staging_bytes=_staging_bytes(memory), digests=digests
    )
    return LoraStore(
        model_lora, device_loader, max_loras=settings.max_loras, read_ahead=read_ahead, num_threads=num_threads,
        tables=tables, arena=device_loader.arena,
    )  # fmt: skip


def loading_threads() -> int:
    """All cores that this process may use but the engine thread's: digesting takes a core 1.3 GB/s, the link 50."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores - 1, 2), _MAX_THREADS)


def _reserve(settings: EngineSettings, model: LlamaModel, read_ahead: int) -> Tensor:
    """The adapters' memory; less than planned where the device has less, so that fewer stay loaded."""
    nbytes = adapter_bytes(settings, model.config, model.dtype, read_ahead)
    if settings.max_lora_bytes is None:
        nbytes = min(nbytes, int(torch.cuda.mem_get_info(model.device)[0] * _UNPLANNED_SHARE))
    while True:
        try:
            return torch.empty(nbytes // model.dtype.itemsize, dtype=model.dtype, device=model.device)
        except torch.OutOfMemoryError:
            if nbytes < _LEAST_BYTES:
                raise
            nbytes //= 2


def _staging_bytes(memory: Tensor) -> int:
    return min(memory.nbytes, _STAGING_BYTES)


def adapter_bytes(settings: EngineSettings, config: ModelConfig, dtype: torch.dtype, read_ahead: int) -> int:
    """What adapters may hold on the device: ``max_lora_bytes``, which those in slots and those read ahead share, or
    without it as if the slots' and those read ahead, no more than all of the job, had ``max_lora_rank`` in every
    module."""
    adapters = min(settings.max_loras + read_ahead, len(settings.adapters))
    nbytes = settings.max_lora_bytes
    if nbytes is None:
        nbytes = adapters * config.lora_parameters(settings.max_lora_rank) * dtype.itemsize
    gaps = adapters * 2 * len(config.lora_modules()) * ALIGN * dtype.itemsize  # each matrix begins at a multiple
    return -(-(nbytes + gaps) // ALIGN) * ALIGN
