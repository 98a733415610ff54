"""Adapters as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from punica_batch.planning.adapters import AdapterDetails
from punica_batch.ui.format import kib


def adapters_table(reports: Sequence[AdapterDetails]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("adapter", no_wrap=True)
    table.add_column("ranks", justify="right")
    table.add_column("targets", overflow="fold")
    table.add_column("file", justify="right", no_wrap=True)
    table.add_column("sha256", no_wrap=True, style="dim")
    table.add_column("", no_wrap=True)
    for r in reports:
        state = (
            Text("problem", style="red") if r.problem else Text("warning", style="yellow") if r.warnings else Text("ok")
        )
        digest = (r.sha256 or "")[:12]
        table.add_row(Text(r.name), _ranks(r.ranks), Text(" ".join(r.targets)), kib(r.nbytes), digest, state)
    lines = [Text(f"problem: {r.problem}", style="red") for r in reports if r.problem]
    lines += [Text(f"warning: {r.name}: {line}", style="yellow") for r in reports for line in r.warnings]
    return Group(table, *lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 2 else ", ".join(map(str, ranks))
