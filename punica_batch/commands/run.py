"""``punica-batch run``: generate for every row."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from punica_batch.commands.options import Inputs, Json, Quiet, Verbose, load_job, takes_job_flags
from punica_batch.errors import UsageError

Show = Annotated[int, typer.Option("--show", min=0, metavar="N", help="Print the output's first N rows at the end.")]


@takes_job_flags()
def run(
    inputs: Inputs = None,
    show: Show = 0,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **job: Any,
) -> int:
    """Generate for every row. The same command again continues a job that was interrupted."""
    if show and json:
        raise UsageError("--show prints rows for people, --json one object for programs: leave one of them out")
    config = load_job(inputs, job)

    from punica_batch.job.runner import run_job
    from punica_batch.planning.retry import retry_command
    from punica_batch.ui.console import emit, emit_json, render
    from punica_batch.ui.progress import make_progress
    from punica_batch.ui.summary import summary_view
    from punica_batch.ui.table import OutputTable

    progress = make_progress(quiet=quiet)
    try:
        summary = run_job(config, progress)
    finally:
        progress.close()
    if json:
        emit_json(summary.as_dict())
        return summary.exit_code
    if show:
        emit(render(OutputTable(summary.output, config, show)) + "\n")
    emit(render(summary_view(summary, retry_with=retry_command(config, summary.output))))
    return summary.exit_code
