"""``punica-batch status``: how far a job is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from punica_batch.commands.options import NAMED_CONFIG, Json, Verbose, given, takes_job_flags

Output = Annotated[str, typer.Argument(help="The output of a run, finished or not.", metavar="OUTPUT")]


@takes_job_flags(("work_dir", "storage_options"), config_help=NAMED_CONFIG)
def status(output: Output, json: Json = False, verbose: Verbose = False, **job: Any) -> int:
    """Say how far OUTPUT is: rows done, errors, whether a run is at work on it. Takes no lock, changes nothing."""
    from punica_batch.config_sources import load_config
    from punica_batch.planning.status import output_status
    from punica_batch.ui.console import emit, emit_json, render
    from punica_batch.ui.status import status_view

    config = load_config((), given(job), config=job.get("config"), environ={}, search=False)
    report = output_status(output, config.work_dir, config.storage_options)
    if json:
        emit_json(report.as_dict())
    else:
        emit(render(status_view(report)))
    return 0
