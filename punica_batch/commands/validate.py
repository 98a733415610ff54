"""``punica-batch validate``: every row, adapter and template checked on the CPU."""

from __future__ import annotations

from typing import Any

from punica_batch.commands.options import Inputs, Json, Quiet, Verbose, load_job, takes_job_flags


@takes_job_flags()
def validate(
    inputs: Inputs = None, json: Json = False, quiet: Quiet = False, verbose: Verbose = False, **job: Any
) -> int:
    """Check every row, adapter and template on the CPU. Exit 0: nothing would fail; 3: some rows; 4: run would stop."""
    config = load_job(inputs, job)

    from punica_batch.planning.validation import validate_rows
    from punica_batch.ui.console import emit, emit_json, render
    from punica_batch.ui.progress import make_progress
    from punica_batch.ui.validation import validation_view

    progress = make_progress(quiet=quiet)
    try:
        report = validate_rows(config, progress)
    finally:
        progress.close()
    if json:
        emit_json(report.as_dict())
    else:
        emit(render(validation_view(report)))
    return report.exit_code
