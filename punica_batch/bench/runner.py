"""Runs one benchmark of the registry: checks what it needs first, bounds its time, cleans up after it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from punica_batch.bench.device import free_memory, open_device
from punica_batch.bench.figure import require_matplotlib
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.record import CPU_NOTE, figure_path, lines_path
from punica_batch.bench.registry import Bench
from punica_batch.errors import JobError, UsageError


def check(options: BenchOptions) -> None:
    """Raises ``UsageError`` for a device or matplotlib that is not there."""
    open_device(options.device)
    require_matplotlib()


def missing(bench: Bench) -> str | None:
    """Says what of its ``needs`` cannot be imported, and the line that mends it; None: nothing."""
    for name in bench.needs:
        try:
            import_module(name)
        except ImportError as error:
            why = " ".join(str(error).split())[:200]
            return f"bench {bench.name} needs {name} ({why}): pip install 'punica-batch[bench]'"
    return None


def run_bench(bench: Bench, options: BenchOptions, **more: Any) -> None:
    """``more``: what this benchmark alone is told. Raises ``UsageError`` as ``check`` does and for what is
    ``missing``, ``JobError`` when the GPU's memory is too small for the benchmark."""
    check(options)
    if lack := missing(bench):
        raise UsageError(lack)
    if options.quick and options.seconds == math.inf:
        options = replace(options, seconds=bench.quick_seconds)
    print(f"{bench.name}: {bench.summary}", file=sys.stderr, flush=True)
    try:
        import_module(bench.module).run(options, **more)
    except torch.cuda.OutOfMemoryError as error:
        raise JobError(
            f"{options.model_shape} shape, {options.dtype}: the GPU's free memory is too small for this benchmark: "
            "end what else uses the GPU, or take a smaller --model-shape"
        ) from error
    finally:
        free_memory(torch.device(options.device))
    print(f"{bench.name}: {_outcome(bench.name, options)}", file=sys.stderr, flush=True)


def _outcome(name: str, options: BenchOptions) -> str:
    """Where lines and figure are, and on a CPU what they are worth."""
    lines = lines_path(name, options)
    written = f"lines in {lines}" if lines.exists() else "no lines"
    note = f"; {CPU_NOTE}" if options.device == "cpu" else ""
    return f"{written}, figure {figure_path(name, options)}{note}"
