"""``plan``: puts together what a job would do. Only reads: no weights, no worker, nothing written."""

from __future__ import annotations

from punica_batch.config import JobConfig
from punica_batch.data.paths import output_path, whole
from punica_batch.engine.settings import resolve_dtypes
from punica_batch.errors import ValidationError
from punica_batch.planner.memory import MAX_BATCH, MemoryPlan
from punica_batch.planner.plan import (
    AdapterRows,
    InputFile,
    Plan,
    adapter_summary,
    expected_errors,
    parts,
    placement_summary,
    token_estimate,
    window_summary,
)
from punica_batch.planning.memory import slot_bytes, worker_memory
from punica_batch.planning.opened import OpenedJob, open_job, shard_rows
from punica_batch.planning.preflight import Preflight, allowance, allowed_failures, preflight
from punica_batch.planning.sample import RowSample, sample_rows
from punica_batch.workers.devices import Device, find_devices


def make_plan(config: JobConfig, *, exact: bool = False) -> Plan:
    """What ``run`` would do with ``config``. ``exact``: tokenizes every row.

    Raises what ``open_job`` raises, and ``UsageError`` or ``JobError`` for devices that are not there.
    """
    notes: list[str] = []
    job = open_job(config)
    devices = find_devices(config, notes.append)
    start, stop = shard_rows(config, job.source.num_rows)
    rows = stop - start
    found = preflight(job, start, stop)
    sample = sample_rows(job, found, start, stop, exact=exact)
    scale = rows / sample.rows if sample.rows else 1.0
    samples = round(sum(sample.samples) * scale)
    memory = _memory(job, found, devices[0], sample, samples, notes)
    adapters = adapter_summary(_adapter_rows(job, found, devices[0], rows), exact=found.use.exact)
    row_errors = {code: round(number * scale) for code, number in sample.errors.items()}
    limit = allowed_failures(config, rows)
    output = output_path(config)
    tokens = token_estimate(
        sample.prompt_tokens, sample.generated_tokens, rows=round(len(sample.samples) * scale), exact=sample.exact
    )
    return Plan(
        model=str(job.model_folder),
        inputs=tuple(InputFile(file.path, file.size, file.rows) for file in job.source.files),
        rows=rows,
        samples=samples,
        tokens=tokens,
        adapters=adapters,
        errors=expected_errors(adapters, row_errors, limit=limit, allowance=allowance(config, rows)),
        placement=placement_summary(
            devices[0].kind,
            (device.name for device in devices),
            samples=samples,
            max_num_seqs=memory.max_num_seqs if memory is not None else MAX_BATCH,
            pack=config.pack,
        ),
        memory=memory,
        window=window_summary(rows, len(found.use.rows)),
        parts=parts(whole(output), rows, config.rows_per_shard, single_file=not output.endswith("/")),
        previews=() if sample.preview is None else (sample.preview,),
        warnings=(*notes, *found.warnings),
        option_columns=job.source.option_columns,
    )


def _memory(
    job: OpenedJob, found: Preflight, device: Device, sample: RowSample, samples: int, notes: list[str]
) -> MemoryPlan | None:
    """None, and a note, when the job does not fit the device: the rest of the plan is worth seeing then, too."""
    try:
        return worker_memory(job, found, device, sample.row_tokens, samples)
    except ValidationError as error:
        notes.append(f"run would stop: {error}")
        return None


def _adapter_rows(job: OpenedJob, found: Preflight, device: Device, rows: int) -> list[AdapterRows]:
    scale = 1.0 if found.use.exact or not found.use.counted else rows / found.use.counted
    dtype = resolve_dtypes(job.config, job.model.torch_dtype, device.kind).model
    entries = []
    for name, number in found.use.rows.items():
        report = found.reports.get(name) if name is not None and name not in found.errors else None
        entries.append(
            AdapterRows(
                lora_id=name,
                rows=round(number * scale),
                rank=report.rank if report is not None else None,
                nbytes=slot_bytes(report, job.model, dtype) if report is not None else None,
                problem=found.errors.get(name) if name is not None else None,
            )
        )
    return entries
