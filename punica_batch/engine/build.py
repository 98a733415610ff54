"""From settings to an engine that is ready to run: kernels, weights, adapter slots, KV cache."""

from __future__ import annotations

import warnings

import torch
from punica_batch_kernels.attention.types import AttentionShape
from punica_batch_kernels.backend import Kernels, kernels_for
from punica_batch_kernels.sgmv.slot_table import SlotTables

from punica_batch.adapters.digest import cache_folder
from punica_batch.engine.engine import Engine
from punica_batch.engine.kv_cache import KVCache
from punica_batch.engine.lora_pack import adapter_loader, groups_of
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.model_runner import ModelRunner
from punica_batch.engine.rows import Endings
from punica_batch.engine.settings import EngineSettings
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora
from punica_batch.models.weights import load_model
from punica_batch.text.tokenizer import Tokenizer


def build_engine(settings: EngineSettings) -> Engine:
    """Loads tokenizer and model and reserves the KV cache. Raises ``ModelError`` when the folder is not usable."""
    config = ModelConfig.from_folder(settings.model)
    tokenizer = Tokenizer.load(settings.tokenizer or settings.model, settings.model)
    dtype, device = getattr(torch, settings.dtype), torch.device(settings.device)
    model = load_model(config, settings.model, dtype, device, engine_kernels(config, settings))
    return assemble_engine(model, tokenizer, settings)


def engine_kernels(config: ModelConfig, settings: EngineSettings) -> Kernels:
    """The kernels for this model and device; warns where they are not the device's best."""
    windows = frozenset(config.sliding_windows)
    shape = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, windows)
    dtype, kv_dtype = getattr(torch, settings.dtype), getattr(torch, settings.kv_cache_dtype)
    kernels = kernels_for(torch.device(settings.device), dtype, shape, kv_dtype, cache_folder())
    if kernels.note is not None:
        warnings.warn(kernels.note, stacklevel=2)
    return kernels


def assemble_engine(model: LlamaModel, tokenizer: Tokenizer, settings: EngineSettings) -> Engine:
    """An engine around a model that is on the settings' device."""
    config, device = model.config, model.device
    model_lora = ModelLora.empty(config, settings.max_loras)
    tables = None
    if device.type == "cuda":
        tables = SlotTables(groups_of(model_lora), settings.max_lora_rank, model.dtype, device)
    store = LoraStore(
        model_lora, adapter_loader(settings, model),
        max_loras=settings.max_loras, read_ahead=settings.read_ahead, tables=tables,
    )  # fmt: skip
    cache = KVCache(
        num_layers=config.num_hidden_layers, num_blocks=settings.num_blocks, block_size=settings.block_size,
        num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
        dtype=getattr(torch, settings.kv_cache_dtype), device=device,
    )  # fmt: skip
    endings = Endings(tokenizer, frozenset(tokenizer.eos_token_ids), settings.max_model_len)
    return Engine(ModelRunner(model, cache, store, settings.seed), store, endings, settings)
