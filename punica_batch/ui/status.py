"""How far an output is, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from punica_batch.planning.status import OutputStatus
from punica_batch.ui.format import count, errors
from punica_batch.ui.summary import facts_view


def status_view(status: OutputStatus) -> RenderableType:
    sums = status.as_dict()
    share = 100 * sums["rows_done"] / sums["rows"] if sums["rows"] else 100
    state = "finished" if status.finished else "running" if status.running else "not finished: run it again to continue"
    facts = {"output": status.output, "state": f"{state}{' (being made anew)' if status.overwriting else ''}"}
    facts["rows"] = f"{count(sums['rows_done'])} of {count(sums['rows'])} ({share:.0f} %)"
    if sums["journalled"]:
        facts["rows"] += f", {count(sums['journalled'])} of them not yet in a part"
    facts["parts"] = f"{count(sums['parts_done'])} of {count(sums['parts'])}"
    if sums["rows_error"]:
        facts["errors"] = f"{count(sums['rows_error'])} ({errors(sums['errors_by_code'])})"
    if sums["finish_reasons"]:
        facts["ended by"] = errors(sums["finish_reasons"])
    holders = [part.holder for part in status.slices if part.holder is not None]
    if holders:
        facts["run by"] = ", ".join(holders)
    views: list[RenderableType] = [facts_view(facts)]
    if len(status.slices) > 1:
        views.append(_slices(status))
    return Group(*views)


def _slices(status: OutputStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("shard", "rows", "parts", "run by"):
        table.add_column(name, justify="right" if name in ("rows", "parts") else "left", no_wrap=True)
    for part in status.slices:
        rows = f"{count(part.rows_done)}/{count(part.rows)}"
        table.add_row(part.shard, rows, f"{part.parts_done}/{part.parts}", part.holder or "–")
    return table
