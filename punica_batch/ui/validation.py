"""What ``validate`` found, as a table by code."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from punica_batch.planning.validation import ValidationReport
from punica_batch.ui.format import count, plural

PROBLEMS_SHOWN = 50


def validation_view(report: ValidationReport) -> RenderableType:
    views: list[RenderableType] = []
    if report.failures:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("code", no_wrap=True)
        table.add_column("rows", justify="right", no_wrap=True)
        table.add_column("row numbers", overflow="fold")
        table.add_column("the first", overflow="fold")
        for failure in report.failures:
            numbers = ", ".join(map(str, failure.first_rows)) + (" …" if failure.rows > len(failure.first_rows) else "")
            sentence = failure.example.partition(": ")[2]
            table.add_row(Text(failure.code, style="red"), count(failure.rows), numbers, Text(sentence))
        views.append(table)
    problems = len(report.problems)
    views += [Text(f"problem: {line}", style="red") for line in report.problems[:PROBLEMS_SHOWN]]
    if problems > PROBLEMS_SHOWN:
        views.append(Text(f"… and {count(problems - PROBLEMS_SHOWN)} more; --json lists all", style="red"))
    views += [Text(f"warning: {line}", style="yellow") for line in report.warnings]
    if report.option_columns:
        views.append(Text(f"columns taken as options of their rows: {', '.join(report.option_columns)}"))
    good = report.rows - report.rows_failing
    faulty = f" ({count(problems)} missing or bad)" if problems else ""
    adapters = f"{plural(report.adapters, 'adapter')}{faulty}"
    views.append(Text(f"{count(good)} of {plural(report.rows, 'row')} would run, {adapters}"))
    if report.stops:
        stops = f"{plural(report.rows_failing, 'row')} would fail, {report.allowance}"
        views.append(Text(f"run would stop: {stops}", style="bold red"))
    return Group(*views)
