"""``retry_job``: an output's error rows once more, in place; all other rows stay as they are."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from punica_batch.config import JobConfig
from punica_batch.data.retry import Retry
from punica_batch.data.rowset import RowSet
from punica_batch.data.state import JobState
from punica_batch.errors import InputError, ended
from punica_batch.job.collector import Collector
from punica_batch.job.loop import Loop, Scope
from punica_batch.job.runner import finish_output, finish_run
from punica_batch.job.setup import binder, binding, prepare
from punica_batch.job.stop import StopRequest
from punica_batch.planning.opened import OpenedJob, open_job
from punica_batch.planning.preflight import allowance
from punica_batch.progress import JobSummary, NoProgress, Progress, Snapshot
from punica_batch.workers.devices import Device, find_devices


def retry_job(config: JobConfig, progress: Progress | None = None) -> JobSummary:
    """Runs the error rows of ``config``'s output again, with whatever adapters the registry has now. Of an unfinished
    output, the rows that were not run yet are run, too.

    Raises what ``run_job`` raises; interrupted, the same call continues.
    """
    progress = progress or NoProgress()
    began = time.monotonic()
    with StopRequest(config.max_runtime) as stop:
        job = _open(config)
        devices = find_devices(config, progress.note)
        bound = binding(job, devices)
        with JobState.open(config, bound, source=job.source, forget_errors=True, is_retry=True) as state:
            retry = Retry(state)
            loops = []
            rows = retry.rows  # reads the output: once
            if len(rows):
                loops.append(_rerun(job, devices, state, retry, rows, progress, stop, began))
            applied = retry.apply()
            if not state.is_finished:
                loops += finish_run(job, devices, state, progress, stop, began, rebind=True)
            summary = finish_output(job, state, loops, progress, began)
            # Rows that an interrupted retry had run were put in their places now.
            return replace(summary, already_complete=summary.already_complete and not applied)


def _open(config: JobConfig) -> OpenedJob:
    """The output's job. What its input lacks now, no option of a retry can say otherwise."""
    try:
        return open_job(config)
    except InputError as error:
        raise InputError(
            f"{ended(str(error))} A retry needs the input as it was, where it was: bring it back, or start over with "
            "`run --overwrite`"
        ) from error


def _rerun(
    job: OpenedJob,
    devices: list[Device],
    state: JobState,
    retry: Retry,
    rows: NDArray[np.int64],
    progress: Progress,
    stop: StopRequest,
    began: float,
) -> Loop:
    """Runs ``rows``, what is left of the error rows, into the retry's own journal."""
    progress.update(Snapshot(rows_total=len(rows), elapsed_s=time.monotonic() - began))
    start, last = int(rows[0]), int(rows[-1]) + 1
    done = RowSet()
    done.add_many(np.setdiff1d(np.arange(start, last), rows, assume_unique=True))
    now = datetime.fromtimestamp(state.plan.created, UTC)
    # That rows fail is known here, and no reason to stop.
    tolerant = job.config.model_copy(update={"max_errors": "100%"})
    setup = prepare(replace(job, config=tolerant), devices, start, last, progress.note, now=now)
    collector = Collector(
        retry.journal,
        bind=binder(state, setup, rebind=True),
        commit=lambda: None,
        errors_before=0,
        max_errors=0 if job.config.on_error == "raise" else None,
        allowance=allowance(tolerant, last - start),
        advice="mend the cause, then run the same command again, which tries that row anew",
    )
    scope = Scope(start, last, done, total=len(rows), before=0, began=began, parts=lambda: (0, 0))
    loop = Loop(job.config, job.source, setup, scope, collector, progress, stop)
    loop.run()
    progress.update(loop.snapshot(phase="assembling"))
    return loop
