"""``punica-batch plan``: what ``run`` would do."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from punica_batch.commands.options import Inputs, Json, Verbose, load_job, takes_job_flags

Exact = Annotated[bool, typer.Option("--exact", help="Tokenize every row, not a sample of them.")]


@takes_job_flags()
def plan(inputs: Inputs = None, exact: Exact = False, json: Json = False, verbose: Verbose = False, **job: Any) -> int:
    """Say what `run` would do: rows, tokens, adapters, placement, memory. Loads no weights. Exit 0 also where it says
    that `run` would stop: it goes by a sample of the rows, `validate` by all of them (exit 4)."""
    config = load_job(inputs, job)

    from punica_batch.planning.overview import make_plan
    from punica_batch.ui.console import emit, emit_json, render
    from punica_batch.ui.plan import plan_view

    found = make_plan(config, exact=exact)
    if json:
        emit_json(found.to_json())
    else:
        emit(render(plan_view(found)))
    return 0
