"""The results as Markdown: ``punica-batch bench table`` prints what the README shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from punica_batch.bench.options import SCHEMA_VERSION
from punica_batch.errors import UsageError
from punica_batch.types import JsonDict

# Lines that agree in these were measured alike: of those the latest run counts.
_ALIKE = ("bench", "gpu", "model_shape", "dtype", "rank", "device")


def markdown(results: Path, *, everything: bool = False) -> str:
    """A table a benchmark and shape: the latest run's headlines, or ``everything`` of it.

    Raises ``UsageError`` when the folder holds no results of ``bench``.
    """
    runs = latest_runs(read_lines(results))
    if not runs:
        raise UsageError(
            f"{results}: no results of punica-batch bench: run it first, or name their folder by --results"
        )
    tables = [_section(lines if everything else [line for line in lines if line["headline"]]) for lines in runs]
    return "\n\n".join(table for table in tables if table)


def read_lines(results: Path) -> list[JsonDict]:
    """The lines of every file that ``Recorder`` wrote, in the order of their writing."""
    lines = []
    for path in sorted(results.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "bench" in line and line.get("schema_version") == SCHEMA_VERSION:
                lines.append(line)
    return lines


def latest_runs(lines: Iterable[JsonDict]) -> list[list[JsonDict]]:
    """The lines of the last run of each benchmark, GPU, shape, dtype and rank."""
    runs: dict[tuple[object, ...], list[JsonDict]] = {}
    for line in lines:
        key = tuple(line[name] for name in _ALIKE)
        if key in runs and runs[key][0]["run"] != line["run"]:
            runs[key] = []
        runs.setdefault(key, []).append(line)
    return list(runs.values())


def _section(lines: Sequence[JsonDict]) -> str:
    if not lines:
        return ""
    first = lines[0]
    names = list(dict.fromkeys(name for line in lines for name in line["parameters"]))
    heads = ["measured", *names, "median", "p10 to p90", "limit", "of the limit"]
    rows = [[line["what"], *(_cell(line["parameters"].get(name)) for name in names), *_figures(line)] for line in lines]
    table = [heads, ["---"] * len(heads), *rows]
    where = ", ".join(
        [
            first["gpu"] or "CPU (times mean nothing)", f"{first['model_shape']} shape", first["dtype"],
            f"rank {first['rank']}", f"torch {first['versions']['torch']}", f"commit {first['commit']}",
            f"`{first['command']}`",
        ]
    )  # fmt: skip
    return "\n".join([f"**{first['bench']}** ({where})", "", *("| " + " | ".join(row) + " |" for row in table)])


def _figures(line: JsonDict) -> list[str]:
    unit = line["unit"].replace("us", "µs")
    spread = f"{_number(line['p10'])} to {_number(line['p90'])}" if line["n"] > 1 else ""
    cells = [f"{_number(line['median'])} {unit}", spread]
    if line["limit"] is None:
        return [*cells, "", ""]
    # a rate's share of the highest one, or the least time's share of the time
    is_rate = "/s" in unit
    share = line["median"] / line["limit"] if is_rate else line["limit"] / line["median"]
    return [*cells, _number(line["limit"]), f"{100 * share:.0f} %"]


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _number(value: float) -> str:
    """Three significant digits, and all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
