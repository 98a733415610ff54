"""What a job runs with: checked adapters, devices, and the settings of every worker."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from punica_batch.adapters.digest import DigestCache
from punica_batch.adapters.peft import inspect_adapter
from punica_batch.adapters.weights import adapter_digest
from punica_batch.config import JobConfig
from punica_batch.data.state import JobState
from punica_batch.engine.settings import DEFAULT_MAX_LORA_RANK, EngineSettings, resolve_dtypes
from punica_batch.errors import RowError
from punica_batch.models.config import model_digest
from punica_batch.planning.memory import batched_tokens, worker_memory
from punica_batch.planning.opened import OpenedJob
from punica_batch.planning.preflight import Preflight, preflight, refuse_if_too_many
from punica_batch.planning.sample import RowSample, sample_rows
from punica_batch.text.settings import TextSettings
from punica_batch.text.tokenizer import Tokenizer
from punica_batch.types import AdapterSpec, JsonDict
from punica_batch.workers.devices import Device
from punica_batch.workers.pool import WorkerSpec

_CORES_PER_TEXT_WORKER = 8
_MAX_TEXT_WORKERS = 4


@dataclass(frozen=True)
class Setup:
    """``text``: of the ``text_workers``; ``workers``: one a device, each with its memory plan in its settings."""

    found: Preflight
    text: TextSettings
    text_workers: int
    workers: list[WorkerSpec]


def prepare(
    job: OpenedJob, devices: Sequence[Device], start: int, stop: int, note: Callable[[str], None], *, now: datetime
) -> Setup:
    """Checks the adapters that the rows ``start:stop`` name and divides the devices' memory.

    ``now``: the date that chat templates see: the job's, so that a resume on another day renders the same.

    Raises ``ValidationError`` when too many rows would fail or the job does not fit, and what
    ``preflight`` raises.
    """
    found = preflight(job, start, stop)
    refuse_if_too_many(found, job.config, stop - start)
    for line in found.warnings:
        note(line)
    specs = _specs(job, found)
    text = replace(job.text_settings(specs, found.errors), now=now)
    sample = sample_rows(job, found, start, stop, exact=False)
    return Setup(
        found=found,
        text=text,
        text_workers=max(1, min(_MAX_TEXT_WORKERS, (os.cpu_count() or 1) // _CORES_PER_TEXT_WORKER)),
        workers=[_worker(job, found, specs, sample, device, stop - start) for device in devices],
    )


def binding(job: OpenedJob, devices: Sequence[Device], finished: JsonDict | None = None) -> JsonDict:
    """What decides the generations beside the options, the inputs and the adapters.

    ``finished``: what bound the output, if it is finished. Then no device is asked (``devices`` is empty), and "auto"
    is taken for what it was resolved to.
    """
    config = job.config
    if finished is not None:
        own = {name: finished[name] for name in ("dtype", "kv_cache_dtype") if getattr(config, name) == "auto"}
        config = config.model_copy(update=own)
    kind = devices[0].kind if devices else "cpu"
    dtypes = resolve_dtypes(config, job.model.torch_dtype, kind)
    return {
        "model_sha256": model_digest(job.model_folder),
        "tokenizer_sha256": Tokenizer.load(job.tokenizer_folder, job.model_folder).digest,
        "chat_template": job.text_settings({}, {}).chat_template,
        "max_model_len": job.max_model_len,
        "dtype": dtypes.model,
        "kv_cache_dtype": dtypes.kv_cache,
    }


def bound_digest(spec: AdapterSpec, sha256: str) -> str:
    """What an adapter's rows depend on: its files' digest, joined by that of its registry settings if it has any."""
    settings = asdict(replace(spec, path="", labels=None, label_template=None))
    if not any(value for key, value in settings.items() if key != "name"):
        return sha256
    return hashlib.sha256(json.dumps([sha256, settings], sort_keys=True).encode()).hexdigest()


def binder(state: JobState, setup: Setup, *, rebind: bool) -> Callable[[Mapping[str, str]], None]:
    """Records the digests (by name) of adapters that have answered rows; ``rebind`` accepts changed ones."""

    def bind(digests: Mapping[str, str]) -> None:
        bound = {name: bound_digest(setup.text.adapters[name], digest) for name, digest in digests.items()}
        state.bind_adapters(bound, rebind=rebind)

    return bind


def check_bound_adapters(state: JobState, found: Preflight, config: JobConfig) -> None:
    """Raises ``BindingError`` when an adapter that has answered rows in an earlier run is another one now."""
    with DigestCache() as cache:
        for name in state.adapter_digests:
            spec = found.specs.get(name)
            if spec is not None:
                digest = adapter_digest(inspect_adapter(spec, config.storage_options), cache)
                state.bind_adapters({name: bound_digest(spec, digest)})


def _specs(job: OpenedJob, found: Preflight) -> Mapping[str, AdapterSpec]:
    """The adapters that rows may name. Where not all rows could be counted in time, that is the whole registry."""
    if found.use.exact:
        return found.specs
    specs = dict(found.specs)
    for name in job.registry.names():
        if name not in specs and name not in found.errors:
            try:
                specs[name] = job.registry.get(name)
            except RowError:
                continue
    return specs


def _max_lora_rank(job: OpenedJob, found: Preflight) -> int:
    """The largest rank that rows may bring: of the adapters that were counted, and of those that were not."""
    if found.use.exact:
        return max(found.max_rank, 1)
    return max(found.max_rank, job.config.max_lora_rank or DEFAULT_MAX_LORA_RANK)


def _worker(
    job: OpenedJob, found: Preflight, specs: Mapping[str, AdapterSpec], sample: RowSample, device: Device, rows: int
) -> WorkerSpec:
    sequences = round(rows * sum(sample.samples) / len(sample.samples)) if sample.samples else rows
    memory = worker_memory(job, found, device, sample.row_tokens, sequences)
    dtypes = resolve_dtypes(job.config, job.model.torch_dtype, device.kind)
    settings = EngineSettings(
        model=str(job.model_folder),
        tokenizer=str(job.tokenizer_folder),
        dtype=dtypes.model,
        kv_cache_dtype=dtypes.kv_cache,
        device=device.kind,
        num_blocks=memory.num_blocks,
        block_size=job.config.block_size,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=batched_tokens(job.config, device.kind),
        max_model_len=job.max_model_len,
        max_loras=memory.max_loras,
        max_lora_rank=_max_lora_rank(job, found),
        max_lora_bytes=memory.adapter_bytes or None,
        gpu_memory_utilization=job.config.gpu_memory_utilization,
        adapters=specs,
        storage_options=job.config.storage_options,
        seed=job.config.seed,
    )
    return WorkerSpec(device.name, settings, device.env, device.num_threads, device.cores)
