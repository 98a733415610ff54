"""What one worker's memory is planned with: sizes of weights, KV blocks and adapter slots from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from punica_batch.adapters.check import AdapterReport
from punica_batch.config import JobConfig
from punica_batch.engine.memory import GRAPH_BYTES, activation_bytes
from punica_batch.engine.settings import DEFAULT_BATCHED_TOKENS, DEFAULT_MAX_LORA_RANK, resolve_dtypes
from punica_batch.models.config import DTYPE_BYTES, ModelConfig
from punica_batch.planner.memory import ADAPTER_SHARE, MAX_BATCH, MemoryPlan, memory_plan
from punica_batch.planning.opened import OpenedJob
from punica_batch.planning.preflight import Preflight
from punica_batch.types import Dtype
from punica_batch.workers.devices import Device

# Beside activations: on a CPU torch itself, its allocator's slack, the worker's own objects; on a GPU the context, the
# libraries' workspaces, and what the driver keeps for itself of the memory that it names as the device's.
RUNTIME_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
_USUAL_RANK = 16


def batched_tokens(config: JobConfig, kind: str) -> int:
    """The most tokens of one step on a device of ``kind``: ``--max-num-batched-tokens``, else enough for a full batch
    and prefills that keep the device busy."""
    return config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[kind], config.max_num_seqs or 0)


def worker_memory(
    job: OpenedJob, found: Preflight, device: Device, row_tokens: Sequence[int], num_sequences: int | None
) -> MemoryPlan:
    """How ``device``'s memory is divided. ``row_tokens``: prompt + max_tokens of a sample of the rows;
    ``num_sequences``: rows times samples of the whole job, if known. Raises ``ValidationError`` when it cannot be."""
    config, model = job.config, job.model
    dtypes = resolve_dtypes(config, model.torch_dtype, device.kind)
    block_bytes = model.kv_bytes_per_block(config.block_size, dtypes.kv_cache)
    batch = config.max_num_seqs or MAX_BATCH
    workspace = workspace_bytes(model, batched_tokens(config, device.kind), batch, dtypes.model, device.kind)
    total, weights = int(device.memory_bytes * config.gpu_memory_utilization), model.weight_bytes(dtypes.model)
    return memory_plan(
        total_bytes=total,
        weight_bytes=weights,
        kv_bytes_per_block=block_bytes,
        block_size=config.block_size,
        max_model_len=job.max_model_len,
        max_num_batched_tokens=batched_tokens(config, device.kind),
        workspace_bytes=workspace + block_bytes,  # the cache's scratch block
        adapter_sizes=adapter_sizes(job, found, dtypes.model, max(0, total - weights - workspace)),
        row_tokens=row_tokens,
        num_sequences=num_sequences,
        max_num_seqs=config.max_num_seqs,
        max_loras=config.max_loras,
    )


def adapter_sizes(job: OpenedJob, found: Preflight, dtype: Dtype, room: int) -> list[int]:
    """Bytes of each adapter that rows may name. Where not all rows could be counted, the registry's others are taken to
    be as large as those that were met, but one as the largest there may be, or a quarter of ``room``: an adapter that
    found no room at all would cost its rows."""
    sizes = [slot_bytes(found.reports[name], job.model, dtype) for name in found.specs]
    others = 0 if found.use.exact else len(job.registry.names()) - len(sizes) - len(found.errors)
    if others <= 0:
        return sizes

    def of_rank(rank: int) -> int:
        return job.model.lora_parameters(rank, layers_only=True) * DTYPE_BYTES[dtype]

    usual = sum(sizes) // len(sizes) if sizes else of_rank(_USUAL_RANK)
    largest = of_rank(job.config.max_lora_rank or DEFAULT_MAX_LORA_RANK)
    return [*sizes, *[usual] * (others - 1), max(usual, min(largest, room // ADAPTER_SHARE))]


def slot_bytes(report: AdapterReport, model: ModelConfig, dtype: Dtype) -> int:
    """A and B of one adapter as they lie on the device: its largest rank in every module of its kinds."""
    kinds = set(report.targets)
    adapted = [shape for name, shape in model.lora_modules().items() if name.rpartition(".")[2] in kinds]
    return report.rank * sum(out + inner for out, inner in adapted) * DTYPE_BYTES[dtype]


def workspace_bytes(
    model: ModelConfig, batched_tokens: int, batch: int, dtype: Dtype, kind: Literal["cpu", "cuda"]
) -> int:
    """What a step and the runtime take on a device of this kind, CUDA graphs included."""
    graphs = GRAPH_BYTES if kind == "cuda" else 0
    return RUNTIME_BYTES[kind] + graphs + activation_bytes(model, batched_tokens, batch, dtype)
