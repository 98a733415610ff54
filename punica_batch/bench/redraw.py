"""Draws figures again from the JSON lines: of measurements made where matplotlib was not, or after a change."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from punica_batch.bench.record import Recorder
from punica_batch.bench.registry import BENCHES
from punica_batch.bench.table import latest_runs, read_lines
from punica_batch.errors import UsageError


def redraw(results: Path) -> list[Path]:
    """The figure of the latest run of each benchmark, shape and dtype; returns their paths.

    Raises ``UsageError`` when the folder holds no results of ``bench``, or matplotlib is missing.
    """
    modules = {bench.name: bench.module for bench in BENCHES}
    runs = [lines for lines in latest_runs(read_lines(results)) if lines[0]["bench"] in modules]
    if not runs:
        raise UsageError(f"{results}: no results of punica-batch bench: run it, or name their folder by --results")
    paths = []
    # runs that differ in rank share a figure, and so do quick ones with whole ones
    for lines in sorted(runs, key=lambda lines: (not lines[0]["quick"], str(lines[-1]["time"]))):
        recorder = Recorder.of_run(lines, results)
        import_module(modules[recorder.name]).draw(recorder)
        paths.append(recorder.figure_path)
    return list(dict.fromkeys(paths))
