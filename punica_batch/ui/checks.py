"""A list of checks as a table: what was looked at, how it is, and the command that mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

Level = Literal["ok", "absent", "warning", "missing"]
_STYLES: dict[Level, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """``absent``: not here and not needed for a CPU run; ``missing``: nothing runs without it."""

    name: str
    level: Level
    found: str
    mend: str | None = None


def checks_table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("check", "", "found", "mend it with"):
        table.add_column(name, no_wrap=name in ("check", ""), overflow="fold")
    for check in checks:
        table.add_row(
            check.name, Text(check.level, style=_STYLES[check.level]), Text(check.found), Text(check.mend or "")
        )
    return table
