"""The results as Markdown: ``punica-batch bench table`` prints what the README shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase

from punica_batch.bench.options import SCHEMA_VERSION
from punica_batch.bench.selection import ADAPTERS, LOADS
from punica_batch.errors import JobError, UsageError
from punica_batch.types import JsonDict

# What tables and figures take of a line.
_FIELDS = frozenset({
    "schema_version", "bench", "what", "unit", "median", "p10", "p90", "n", "limit", "headline", "parameters",
    "model_shape", "dtype", "rank", "quick", "run", "device", "gpu", "driver", "note", "versions", "commit", "command",
})  # fmt: skip
# Lines that agree in these were measured alike: of those the latest run counts.
_ALIKE = ("bench", "gpu", "model_shape", "dtype", "rank", "device")
# ... and of these benchmarks, which take long, of each point; a quick run does not stand for a whole one.
_POINTS = {"engine": ("load", "cap", "adapters", "ranks", "weights")}


def markdown(results: Path, *, everything: bool = False) -> str:
    """A table a benchmark and shape: the latest run's headlines, or ``everything`` of it.

    Raises ``UsageError`` when the folder holds no results of ``bench``.
    """
    runs = latest_runs(read_lines(results))
    if not runs:
        raise UsageError(
            f"{results}: no results of punica-batch bench: run it first, or name their folder by --results"
        )
    tables = []
    for lines in runs:
        chosen = lines if everything else [line for line in lines if line["headline"]]
        if chosen:
            is_grid = chosen[0]["bench"] == "engine" and not everything
            tables.append(_grid(chosen) if is_grid else _section(chosen))
    return "\n\n".join(tables)


def read_lines(results: Path) -> list[JsonDict]:
    """The lines of every file that ``Recorder`` wrote, in the order of their writing; others' are passed over. Raises
    ``JobError`` for what is no JSON."""
    lines = []
    for path in sorted(results.glob("*.jsonl")):
        try:
            texts = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeError) as error:
            raise JobError(f"{path} cannot be read as text ({type(error).__name__}): move it away") from error
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text or "null")
            except (ValueError, RecursionError) as error:
                raise JobError(f"{path}, line {number}: not whole, as after a kill: delete the line") from error
            if isinstance(line, dict) and line.keys() >= _FIELDS and line["schema_version"] == SCHEMA_VERSION:
                lines.append(line)
    return lines


def latest_runs(lines: Iterable[JsonDict]) -> list[list[JsonDict]]:
    """The lines of the last run of each benchmark, GPU, shape, dtype and rank; of the engine's, of the last run of each
    point, whole loads and quick runs apart."""
    points: dict[tuple[object, ...], list[JsonDict]] = {}
    for line in lines:
        key = _alike(line)
        if line["bench"] in _POINTS:
            key += tuple(line["parameters"].get(name) for name in _POINTS[line["bench"]])
        if key in points and points[key][0]["run"] != line["run"]:
            points[key] = []
        points.setdefault(key, []).append(line)
    runs: dict[tuple[object, ...], list[JsonDict]] = {}
    for chosen in points.values():
        runs.setdefault(_alike(chosen[0]), []).extend(chosen)
    return list(runs.values())


def _alike(line: JsonDict) -> tuple[object, ...]:
    quick = (line["quick"],) if line["bench"] in _POINTS else ()
    return (*(line[name] for name in _ALIKE), *quick)


def _grid(lines: Sequence[JsonDict]) -> str:
    """The engine's throughput: a row a load, the model's weights, batch cap and ranks, a column a popularity, each
    figure with its share of its own limit and a letter for the run that it comes from."""
    lines = sorted(lines, key=place)
    runs = dict(zip(dict.fromkeys(map(_source, lines)), _letters(), strict=False))
    columns = [kind for kind in ADAPTERS if any(line["parameters"]["adapters"] == kind for line in lines)]
    cells: dict[tuple[int, str, int, tuple[int, ...], str], dict[str, str]] = {}
    for line in lines:
        about = line["parameters"]
        row = (LOADS.index(about["load"]), _load_name(about), about["cap"], _ranks(about), line["unit"])
        share = 100 * line["median"] / line["limit"]
        cells.setdefault(row, {})[about["adapters"]] = (
            f"{_number(line['median'])} ({share:.0f} %) {runs[_source(line)]}"
        )
    heads = ["load", "batch cap", "rank", "unit", *columns]
    table = [heads, ["---"] * len(heads)]
    for (_, load, cap, ranks, unit), own in sorted(cells.items()):
        table.append([load, str(cap), "+".join(map(str, ranks)), unit, *(own.get(column, "") for column in columns)])
    sources = [f"- {letter}: commit {commit}, `{command}`" for (commit, command), letter in runs.items()]
    title = f"**engine** ({_machine(lines[0])}; in brackets the share of the limit)"
    return "\n".join([title, "", *_rows(table), "", *sources])


def _letters() -> Iterator[str]:
    """a to z, then aa, ab, ..."""
    return ("".join(letters) for length in count(1) for letters in product(ascii_lowercase, repeat=length))


def _load_name(about: JsonDict) -> str:
    """By a line's parameters: the load, and the values of the model's weights where they are not the default."""
    return f"{about['load']}, {about['weights']} weights" if "weights" in about else str(about["load"])


def place(line: JsonDict) -> tuple[int, str, int, tuple[int, ...], int]:
    """Of a figure of the engine's among others."""
    about = line["parameters"]
    load, adapters = LOADS.index(about["load"]), ADAPTERS.index(about["adapters"])
    return load, _load_name(about), about["cap"], _ranks(about), adapters


def _ranks(about: JsonDict) -> tuple[int, ...]:
    return tuple(map(int, about["ranks"].split("+")))


def _source(line: JsonDict) -> tuple[str, str]:
    return line["commit"], line["command"]


def _section(lines: Sequence[JsonDict]) -> str:
    first = lines[0]
    names = list(dict.fromkeys(name for line in lines for name in line["parameters"]))
    heads = ["measured", *names, "median", "p10 to p90", "limit", "of the limit"]
    rows = [[line["what"], *(_cell(line["parameters"].get(name)) for name in names), *_figures(line)] for line in lines]
    rank = f"rank {first['rank']}"
    where = f"{_machine(first, rank)}, commit {first['commit']}, `{first['command']}`"
    return "\n".join([f"**{first['bench']}** ({where})", "", *_rows([heads, ["---"] * len(heads), *rows])])


def _machine(line: JsonDict, *more: str) -> str:
    versions = line["versions"]
    named = ("torch", "triton", "flashinfer-python")
    software = [f"{name.removesuffix('-python')} {versions[name]}" for name in named if versions.get(name)]
    gpu = line["gpu"] or "CPU (times mean nothing)"
    driver = [f"driver {line['driver']}"] if line["driver"] else []
    return ", ".join([gpu, f"{line['model_shape']} shape", line["dtype"], *more, *software, *driver])


def _rows(table: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in table]


def _figures(line: JsonDict) -> list[str]:
    unit = line["unit"].replace("us", "µs")
    spread = f"{_number(line['p10'])} to {_number(line['p90'])}" if line["n"] > 1 else ""
    cells = [f"{_number(line['median'])} {unit}", spread]
    if line["limit"] is None:
        return [*cells, "", ""]
    # a rate's (a speedup's) share of the highest one, or the least time's share of the time
    is_rate = "/s" in unit or unit == "times"
    share = line["median"] / line["limit"] if is_rate else line["limit"] / line["median"]
    return [*cells, _number(line["limit"]), f"{100 * share:.0f} %"]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return _number(value)
    return "" if value is None else str(value)


def _number(value: float) -> str:
    """Three significant digits, and all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
