"""``punica-batch doctor``: what this machine has and lacks, and the kernels of a job built before it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from punica_batch.commands.options import FOLDER_CONFIG, Json, Verbose, given, takes_job_flags

if TYPE_CHECKING:
    from punica_batch.config import JobConfig
    from punica_batch.ui.checks import Check

FIELDS = (
    "model", "revision", "tokenizer", "dtype", "kv_cache_dtype", "adapters", "lora_modules", "storage_options",
    "device", "gpus", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_lora_rank", "block_size",
)  # fmt: skip


@takes_job_flags(FIELDS, config_help=FOLDER_CONFIG)
def doctor(json: Json = False, verbose: Verbose = False, **job: Any) -> int:
    """Look over the machine (driver, torch, compilers, memory, disk) and, with --model, build the kernels of its jobs.
    Exit 0 if a `run` with these options would work, else 1."""
    from dataclasses import asdict

    from punica_batch.commands.machine import examine
    from punica_batch.config_sources import load_config
    from punica_batch.ui.checks import checks_table
    from punica_batch.ui.console import emit, emit_json, render

    config = load_config((), given(job), config=job.get("config"))
    checks = examine(config)
    checks += build(config, checks)
    is_fit = all(check.level != "missing" for check in checks)
    if json:
        emit_json({"schema_version": 1, "fit": is_fit, "checks": [asdict(check) for check in checks]})
    else:
        emit(render(checks_table(checks)))
    return 0 if is_fit else 1


def build(config: JobConfig, checks: list[Check]) -> Iterator[Check]:
    """Builds the kernels for each kind of device that a job of ``config`` would use; a line on stderr as each is done.
    Without a model there is nothing to build for, and where something is missing no job runs."""
    from punica_batch.planning.prebuild import engine_settings, kinds_of
    from punica_batch.ui.checks import Check
    from punica_batch.workers.devices import find_devices

    if any(check.level == "missing" for check in checks):
        return
    if config.model is None:
        yield Check("kernels", "absent", "none built: no model is named", "punica-batch doctor --model FOLDER")
        return
    for device in kinds_of(find_devices(config, lambda line: None)):
        yield from build_for(device, *engine_settings(config, device.kind))


def build_for(device: Any, settings: Any, ranks: tuple[int, ...], targets: tuple[str, ...]) -> Iterator[Check]:
    """The checks of one device's kernels: one that sums up, and one for each that could not be built."""
    from punica_batch.errors import JobError
    from punica_batch.ui.checks import Check
    from punica_batch.ui.lines import write_line
    from punica_batch.workers.prebuild import build_kernels

    compiled, seconds = 0, 0.0
    try:
        for stage in build_kernels(settings, device, ranks, targets):
            how = f"failed: {stage.error}" if stage.error else f"{stage.compiled} new" if stage.compiled else "there"
            write_line(f"{stage.name}: {stage.seconds:.1f} s, {how}", sys.stderr)
            compiled += stage.compiled
            seconds += stage.seconds
            if stage.error is not None:
                yield Check("kernels", "warning", f"{stage.name}: {stage.error}", "see flashinfer and nvcc above")
    except JobError as error:
        yield Check("kernels", "missing", str(error), "punica-batch doctor -v; report what it says")
        return
    ranked = f"adapters of rank {', '.join(map(str, ranks))}" if ranks else "no adapters"
    found = f"{compiled} compiled now, the rest was there" if compiled else "all were there"
    yield Check("kernels", "ok", f"{found} ({settings.dtype}, {ranked})")
