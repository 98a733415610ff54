"""``run_job``: every row of the input to an output, from wherever an earlier run stopped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from punica_batch.config import JobConfig
from punica_batch.data.finish import Success
from punica_batch.data.state import JobState, finished_binding
from punica_batch.job.collector import Collector
from punica_batch.job.loop import Loop, Scope
from punica_batch.job.setup import binder, binding, check_bound_adapters, prepare
from punica_batch.job.stop import StopRequest
from punica_batch.planning.opened import OpenedJob, open_job
from punica_batch.planning.preflight import allowed_failures
from punica_batch.progress import JobSummary, NoProgress, Progress, Snapshot
from punica_batch.workers.devices import Device, find_devices

_LENGTH_WARNING = 0.05


def run_job(config: JobConfig, progress: Progress | None = None) -> JobSummary:
    """Generates for every row of ``config.inputs``; continues what an earlier run of the same job left.

    A finished output is left alone. Rows that fail are part of the result, not an error of the job.

    Raises:
        ValidationError: input, model, adapters or options are wrong, found before any work.
        JobError: the job failed; what was done is kept and the same call continues.
        Interrupted: a signal, ``max_runtime``, a full disk, a store away, or an output held by another run.
    """
    progress = progress or NoProgress()
    began = time.monotonic()
    with StopRequest(config.max_runtime) as stop:
        job = open_job(config)
        is_finished = not config.overwrite and finished_binding(config) is not None
        devices = [] if is_finished else find_devices(config, progress.note)
        is_strict = config.on_error == "raise"  # then the row that stopped an earlier run is tried again
        with JobState.open(config, binding(job, devices), source=job.source, forget_errors=is_strict) as state:
            loop = None
            if not state.is_finished:
                devices = devices or find_devices(config, progress.note)
                loop = finish_run(job, devices, state, progress, stop)
            success = state.finish()
            if loop is not None:
                progress.update(loop.snapshot(phase="done"))
            return summarize(state, success, loop, began)


def finish_run(
    job: OpenedJob,
    devices: Sequence[Device],
    state: JobState,
    progress: Progress,
    stop: StopRequest,
    *,
    rebind: bool = False,
) -> Loop | None:
    """Runs the rows that are not done and commits all parts. ``rebind`` accepts adapters that have changed. None:
    no row was left to do."""
    if state.is_committed:
        return None
    config, first, last = job.config, state.first_row, state.stop_row
    progress.update(Snapshot(rows_total=last - first))
    now = datetime.fromtimestamp(state.plan.created, UTC)
    setup = prepare(job, devices, first, last, progress.note, now=now)
    if not rebind:
        check_bound_adapters(state, setup.found, config)
    collector = Collector(
        state.journal,
        bind=binder(state, setup, rebind=rebind),
        commit=lambda: state.commit_ready(limit=1),
        errors_before=state.error_rows,
        max_errors=allowed_failures(config, last - first),
    )
    scope = Scope(
        start=first,
        stop=last,
        done=state.done,
        total=last - first,
        before=state.done.count(first, last),
        parts=lambda: (state.committed, len(state.shard_parts)),
    )
    loop = Loop(config, job.source, setup, scope, collector, progress, stop)
    loop.run()
    progress.update(loop.snapshot(phase="assembling"))
    state.commit_ready()
    return loop


def summarize(state: JobState, success: Success | None, loop: Loop | None, began: float) -> JobSummary:
    """``success`` None: other shards of the output are still at work; the counts are this shard's. ``loop`` None:
    nothing was left to do."""
    if success is None:
        success = Success.of(state.parts, state.base.target)
    elapsed = time.monotonic() - began
    run = loop.snapshot() if loop is not None else Snapshot(rows_total=success.rows)
    return JobSummary(
        output=state.base.shown,
        rows=success.rows,
        rows_done=success.rows,
        rows_error=success.error_rows,
        errors_by_code=success.errors,
        finish_reasons=success.finish_reasons,
        prompt_tokens=run.prompt_tokens,
        generated_tokens=run.generated_tokens,
        elapsed_s=elapsed,
        tokens_per_s=run.generated_tokens / elapsed,
        already_complete=loop is None,
        warnings=_warnings(success),
    )


def _warnings(success: Success) -> tuple[str, ...]:
    samples = sum(success.finish_reasons.values()) - success.finish_reasons.get("error", 0)
    cut = success.finish_reasons.get("length", 0)
    if samples and cut > _LENGTH_WARNING * samples:
        return (f"{cut:,} of {samples:,} generations were cut at max_tokens (finish_reason length): is it enough?",)
    return ()
