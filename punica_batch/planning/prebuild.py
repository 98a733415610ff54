"""What `doctor` builds kernels for: the engine that a job of this configuration would have, without looking at rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from punica_batch.adapters.check import check_adapters
from punica_batch.adapters.registry import Registry
from punica_batch.config import JobConfig
from punica_batch.engine.settings import EngineSettings, resolve_dtypes
from punica_batch.errors import UsageError
from punica_batch.models.config import ModelConfig, resolve_model
from punica_batch.planner.memory import MAX_BATCH
from punica_batch.planning.memory import batched_tokens
from punica_batch.planning.opened import context_length
from punica_batch.workers.devices import Device

_MAX_LOOKED_AT = 2000  # adapters; more of them bring no rank that these do not have
_SLOTS = 64
_CPU_BATCH, _CPU_TOKENS = 4, 64
# Where a rank is given but no registry, on what an adapter usually is.
_USUAL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def kinds_of(devices: Sequence[Device]) -> list[Device]:
    """One device of each kind: others of the same environment but for their number need no kernels of their own."""
    kinds: dict[tuple[str, str | None], Device] = {}
    for device in devices:
        kinds.setdefault((device.kind, device.env.get("FLASHINFER_CUDA_ARCH_LIST")), device)
    return list(kinds.values())


def engine_settings(config: JobConfig, kind: str) -> tuple[EngineSettings, tuple[int, ...], tuple[str, ...]]:
    """(a worker's settings, the ranks of the registry's adapters, the kinds of module that they change). The memory
    plan is left out: a batch is as large as it may be, and the caches hold no more than a trial needs.

    Raises ``UsageError`` (no model), ``ModelError``, ``AdapterError``, ``ConfigError`` and ``StoreAway``.
    """
    if config.model is None:
        raise UsageError("no model is named: give --model, PUNICA_BATCH_MODEL, or `model` in punica-batch.toml")
    folder = resolve_model(config.model, config.revision)
    tokenizer = folder if config.tokenizer is None else resolve_model(config.tokenizer, kind="tokenizer")
    model = ModelConfig.from_folder(folder)
    dtypes = resolve_dtypes(config, model.torch_dtype, kind)
    ranks, targets = _adapters(config, model)
    tokens = batched_tokens(config, kind)
    batch = config.max_num_seqs or min(MAX_BATCH, tokens)
    if kind == "cpu":  # whose kernels are the same for any batch
        batch, tokens = min(batch, _CPU_BATCH), min(tokens, _CPU_TOKENS)
    settings = EngineSettings(
        model=str(folder), tokenizer=str(tokenizer), dtype=dtypes.model, kv_cache_dtype=dtypes.kv_cache, device=kind,
        num_blocks=2 * batch + 8 * -(-tokens // config.block_size), block_size=config.block_size, max_num_seqs=batch,
        max_num_batched_tokens=tokens, max_model_len=context_length(config, model), max_loras=min(batch, _SLOTS),
        max_lora_rank=max(ranks, default=1), gpu_memory_utilization=config.gpu_memory_utilization, seed=config.seed,
    )  # fmt: skip
    return settings, ranks, targets


def _adapters(config: JobConfig, model: ModelConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ranks, lowest first, and targets of the registry's good adapters."""
    registry = Registry.open(config)
    limit = config.max_lora_rank
    specs = (registry.get(name) for name in islice(registry.names(), _MAX_LOOKED_AT))
    reports = [r for r in check_adapters(specs, model.lora_modules(), None, config.storage_options) if r.ok]
    reports = [r for r in reports if limit is None or r.rank <= limit]
    if not reports and limit is not None:
        return (limit,), _USUAL_TARGETS
    targets = {target for report in reports for target in report.targets}
    return tuple(sorted({report.rank for report in reports})), tuple(sorted(targets))
