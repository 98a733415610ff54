"""From settings to an engine that is ready to run: kernels, weights, adapter slots, KV cache."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import torch
from punica_batch_kernels.attention.types import AttentionShape
from punica_batch_kernels.backend import Kernels, kernels_for

from punica_batch.adapters.digest import cache_folder
from punica_batch.engine.engine import Engine
from punica_batch.engine.graphs import CudaRecorder, StepGraphs
from punica_batch.engine.kv_cache import KVCache, allocate_kv_cache
from punica_batch.engine.lora_setup import make_lora_store
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.memory import GRAPH_BYTES, DeviceMemory, activation_bytes
from punica_batch.engine.model_runner import ModelRunner
from punica_batch.engine.rows import Endings
from punica_batch.engine.settings import EngineSettings
from punica_batch.engine.startup import EngineWarning, StartupTimes
from punica_batch.errors import ModelError
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.weights import load_model
from punica_batch.text.tokenizer import Tokenizer

# A plan is made from sizes alone: a KV cache of this share of it is no news.
_AS_PLANNED = 0.95


def build_engine(settings: EngineSettings, times: StartupTimes | None = None) -> Engine:
    """Loads tokenizer and model and reserves the KV cache; ``times`` is told where the seconds go.

    Raises ``ModelError`` when the folder is not usable or the model does not fit the device.
    """
    times = times or StartupTimes()
    config = ModelConfig.from_folder(settings.model)
    device = torch.device(settings.device)
    ordinal = torch.cuda.current_device() if device.type == "cuda" else None
    with ThreadPoolExecutor(1, thread_name_prefix="kernels") as beside:
        making = beside.submit(_timed_kernels, config, settings, times, ordinal)
        if device.type == "cpu":  # reading takes the same cores as compiling
            wait([making])
        with times.stage("device"):
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # makes the context
        with times.stage("tokenizer"):
            tokenizer = Tokenizer.load(settings.tokenizer or settings.model, settings.model)
        with times.stage("weights"):
            model = _load_model(config, settings, device)
        model.use(making.result())
    engine = assemble_engine(model, tokenizer, settings, times)
    with times.stage("graphs"):
        engine.warm_up()
    return engine


def _timed_kernels(config: ModelConfig, settings: EngineSettings, times: StartupTimes, ordinal: int | None) -> Kernels:
    with times.stage("kernels"):
        if ordinal is not None:
            torch.cuda.set_device(ordinal)  # a new thread's is 0
        return engine_kernels(config, settings)


def _load_model(config: ModelConfig, settings: EngineSettings, device: torch.device) -> LlamaModel:
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    try:
        return load_model(config, settings.model, getattr(torch, settings.dtype), device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the weights need {config.weight_bytes(settings.dtype) / 2**30:.1f} GiB and {free / 2**30:.1f} of the "
            f"GPU's {total / 2**30:.1f} GiB were free: free it, or use another GPU or model"
        ) from error


def engine_kernels(config: ModelConfig, settings: EngineSettings) -> Kernels:
    """The kernels for this model and device; warns where they are not the device's best."""
    windows = frozenset(config.sliding_windows)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    shape = AttentionShape(*heads, windows, settings.max_num_seqs)
    dtype, kv_dtype = getattr(torch, settings.dtype), getattr(torch, settings.kv_cache_dtype)
    kernels = kernels_for(torch.device(settings.device), dtype, shape, kv_dtype, cache_folder())
    if kernels.note is not None:
        warnings.warn(kernels.note, EngineWarning, stacklevel=2)
    return kernels


def assemble_engine(
    model: LlamaModel, tokenizer: Tokenizer, settings: EngineSettings, times: StartupTimes | None = None
) -> Engine:
    """An engine around a model that is on the settings' device. Its ``settings`` tell how many KV blocks there are.

    Raises ``ModelError`` when a GPU has no room for the KV cache of one row of full length.
    """
    times = times or StartupTimes()
    config, device = model.config, model.device
    with times.stage("adapters"):
        before = _allocated(device)
        store = _make_lora_store(settings, model)
        to_come = max(0, (settings.max_lora_bytes or 0) - (_allocated(device) - before))
    with times.stage("kv cache"):
        cache = make_kv_cache(config, settings, device, adapter_bytes=to_come)
    settings = replace(settings, num_blocks=cache.num_blocks)
    endings = Endings(tokenizer, frozenset(tokenizer.eos_token_ids), settings.max_model_len)
    graphs = StepGraphs(CudaRecorder(device)) if model.kernels.capturable else None
    runner = ModelRunner(model, cache, store, settings, graphs)
    # a device has its next step before it is done with the last; a CPU would only compute what is thrown away
    return Engine(runner, store, endings, settings, steps_ahead=int(device.type != "cpu"))


def _make_lora_store(settings: EngineSettings, model: LlamaModel) -> LoraStore:
    try:
        return make_lora_store(settings, model)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(model.device)
        raise ModelError(
            f"of the GPU's {total / 2**30:.1f} GiB {free / 2**30:.1f} are left beside the weights, too little for "
            "adapters: free it, or use another GPU"
        ) from error


def make_kv_cache(
    config: ModelConfig, settings: EngineSettings, device: torch.device, *, adapter_bytes: int = 0
) -> KVCache:
    """``settings.num_blocks``, or as many as a GPU has room for beside the ``adapter_bytes`` to come, with a warning
    where that is far less. ``assemble_engine`` says what it raises."""
    wanted = settings.num_blocks
    needed = min(wanted, -(-settings.max_model_len // settings.block_size))
    block_bytes = config.kv_bytes_per_block(settings.block_size, settings.kv_cache_dtype)
    if device.type == "cuda":
        memory = device_memory(config, settings, device, adapter_bytes)
        wanted = memory.num_blocks(block_bytes, wanted=wanted, needed=needed)
    cache = allocate_kv_cache(
        num_layers=config.num_hidden_layers, num_blocks=wanted, min_blocks=needed, block_size=settings.block_size,
        num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
        dtype=getattr(torch, settings.kv_cache_dtype), device=device,
    )  # fmt: skip
    if cache is None:
        raise device_memory(config, settings, device, adapter_bytes).too_small((needed + 1) * block_bytes)
    if cache.num_blocks < _AS_PLANNED * settings.num_blocks:
        warnings.warn(
            f"the KV cache has {cache.num_blocks:,} blocks in place of {settings.num_blocks:,}: other things take more "
            "of the GPU's memory than was planned, so fewer rows may run at a time",
            EngineWarning, stacklevel=2,
        )  # fmt: skip
    return cache


def device_memory(
    config: ModelConfig, settings: EngineSettings, device: torch.device, adapter_bytes: int
) -> DeviceMemory:
    """The GPU as it is now, with all of this engine on it but adapters, KV cache and graphs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    activations = activation_bytes(config, settings.max_num_batched_tokens, settings.max_num_seqs, settings.dtype)
    return DeviceMemory(
        total=total, free=free, own=torch.cuda.memory_reserved(device),
        untouched=int(total * (1 - settings.gpu_memory_utilization)),
        adapters=adapter_bytes, step=activations + GRAPH_BYTES,
    )  # fmt: skip


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
