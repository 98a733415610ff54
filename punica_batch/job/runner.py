"""``run_job``: every row of the input to an output, from wherever an earlier run stopped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from punica_batch.config import JobConfig
from punica_batch.data.finish import Success
from punica_batch.data.state import JobState, finished_binding
from punica_batch.job.collector import Collector
from punica_batch.job.loop import Loop, Scope
from punica_batch.job.setup import binder, binding, check_bound_adapters, prepare
from punica_batch.job.stop import StopRequest
from punica_batch.planning.opened import OpenedJob, open_job
from punica_batch.planning.preflight import allowance, allowed_failures, column_warnings
from punica_batch.planning.retry import retry_command
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
        finished = None if config.overwrite else finished_binding(config)
        devices = [] if finished is not None else find_devices(config, progress.note)
        is_strict = config.on_error == "raise"  # then the row that stopped an earlier run is tried again
        bound = binding(job, devices, finished)
        with JobState.open(config, bound, source=job.source, forget_errors=is_strict) as state:
            loops = []
            if not state.is_finished:
                devices = devices or find_devices(config, progress.note)
                loops = finish_run(job, devices, state, progress, stop, began)
            return finish_output(job, state, loops, progress, began)


def finish_run(
    job: OpenedJob,
    devices: Sequence[Device],
    state: JobState,
    progress: Progress,
    stop: StopRequest,
    began: float,
    *,
    rebind: bool = False,
) -> list[Loop]:
    """Runs the rows that are not done and commits all parts. ``rebind`` accepts adapters that have changed. Returns
    the loop that ran them, none if no row was left to do."""
    if state.is_committed:
        return []
    config, first, last = job.config, state.first_row, state.stop_row
    before = state.done.count(first, last)
    progress.update(Snapshot(last - first, before, before, elapsed_s=time.monotonic() - began))
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
        allowance=allowance(config, last - first),
        advice=_advice(config, state),
    )
    scope = Scope(
        start=first,
        stop=last,
        done=state.done,
        total=last - first,
        before=before,
        began=began,
        parts=lambda: (state.committed, len(state.shard_parts)),
    )
    loop = Loop(config, job.source, setup, scope, collector, progress, stop)
    loop.run()
    progress.update(loop.snapshot(phase="assembling"))
    state.commit_ready()
    return [loop]


def finish_output(
    job: OpenedJob, state: JobState, loops: Sequence[Loop], progress: Progress, began: float
) -> JobSummary:
    """Completes the output if this was the last of its shards, shows the end, and says how it was. ``loops``: what
    this run did; none if nothing was left to do."""
    # None: other shards of the output are still at work; the counts are this shard's.
    success = state.finish() or Success.of(state.parts, state.base.target)
    run = Snapshot(rows_total=success.rows, elapsed_s=time.monotonic() - began)
    if loops:
        run = _last_snapshot(loops, success)
        progress.update(run)
    of_loops = (line for loop in loops for line in loop.warnings)
    warnings = (*column_warnings(job), *of_loops, *_shard_warnings(state), *_length_warnings(success))
    return JobSummary(
        output=state.base.shown,
        rows=success.rows,
        rows_done=success.rows,
        rows_error=success.error_rows,
        errors_by_code=success.errors,
        finish_reasons=success.finish_reasons,
        prompt_tokens=run.prompt_tokens,
        generated_tokens=run.generated_tokens,
        elapsed_s=run.elapsed_s,
        tokens_per_s=run.tokens_per_s,
        rows_run=sum(loop.rows for loop in loops),
        already_complete=not loops,
        warnings=tuple(dict.fromkeys(warnings)),  # each once
    )


def _advice(config: JobConfig, state: JobState) -> str:
    """What goes on after a stop for too many errors, and what does not: failed rows are journalled as such."""
    if config.on_error == "raise":
        return "mend the cause, then run the same command again, which tries that row anew"
    retry = retry_command(config, state.base.shown)
    return (
        f"rows that failed stay so. For what is wrong in adapters, mend them: `{retry}` runs these rows and the rest. "
        "For what is wrong in rows, correct the input: it then needs `run --overwrite`. To go on as it is, run again "
        "with a higher --max-errors"
    )


def _last_snapshot(loops: Sequence[Loop], success: Success) -> Snapshot:
    """The end of the last loop, with the tokens of all and the output's errors: what the summary says, too."""
    ends = [loop.snapshot(phase="done") for loop in loops]
    last = ends[-1]
    generated = sum(end.generated_tokens for end in ends)
    return replace(
        last,
        rows_error=success.error_rows,
        errors_by_code=success.errors,
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        generated_tokens=generated,
        tokens_per_s=generated / last.elapsed_s,
        mean_tokens_per_s=generated / last.elapsed_s,
    )


def _shard_warnings(state: JobState) -> tuple[str, ...]:
    if state.shard_parts:
        return ()
    return ("this shard has no rows: the output has fewer parts than shards (see --rows-per-shard)",)


def _length_warnings(success: Success) -> tuple[str, ...]:
    samples = sum(success.finish_reasons.values()) - success.finish_reasons.get("error", 0)
    cut = success.finish_reasons.get("length", 0)
    if samples and cut > _LENGTH_WARNING * samples:
        return (f"{cut:,} of {samples:,} generations were cut at max_tokens (finish_reason length): is it enough?",)
    return ()
