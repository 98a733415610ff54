"""What ``run`` and ``retry`` print when they are through."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from punica_batch.progress import JobSummary
from punica_batch.ui.format import count, duration, errors, plural, short


def summary_view(summary: JobSummary, *, is_retry: bool = False, retry_with: str | None = None) -> RenderableType:
    """Of a ``run``, or ``is_retry``. ``retry_with``: the command to propose for error rows."""
    done = f"{count(summary.rows_done)} of {count(summary.rows)}"
    if is_retry and summary.already_complete:
        done += "; no error rows: nothing to retry"
    elif summary.already_complete and summary.rows:
        done += ", complete before: left as it is"
    facts = {"output": summary.output, "rows": done}
    if summary.rows_error:
        facts["errors"] = f"{count(summary.rows_error)} ({errors(summary.errors_by_code)})"
    if summary.finish_reasons:
        facts["ended by"] = errors(summary.finish_reasons)
    if not summary.already_complete:
        facts |= _of_this_run(summary)
    if summary.rows_error and retry_with is not None:
        facts["retry"] = (
            f"{retry_with} (runs the error rows again, with adapters as they are then; rows that are wrong "
            "themselves need a corrected input, and --overwrite)"
        )
    warnings = [Text(f"warning: {line}", style="yellow") for line in summary.warnings]
    return Group(facts_view(facts), *warnings)


def _of_this_run(summary: JobSummary) -> dict[str, str]:
    """Tokens and time; where earlier runs have done rows, too, with the rows that they belong to."""
    tokens = f"{count(summary.prompt_tokens)} prompt, {count(summary.generated_tokens)} generated"
    time = f"{duration(summary.elapsed_s)} ({short(summary.tokens_per_s)} generated tok/s)"
    if summary.rows_run == summary.rows_done:
        return {"tokens": tokens, "time": time}
    return {"this run": f"{plural(summary.rows_run, 'row')}; tokens: {tokens}; time: {time}"}


def facts_view(facts: Mapping[str, str]) -> Table:
    """Names to the left, values to the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(name, Text(value))
    return grid
