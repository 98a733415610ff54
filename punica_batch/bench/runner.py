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
from punica_batch.bench.registry import Bench
from punica_batch.errors import JobError


def check(options: BenchOptions) -> None:
    """Raises ``UsageError`` for a device or matplotlib that is not there."""
    open_device(options.device)
    require_matplotlib()


def run_bench(bench: Bench, options: BenchOptions, **more: Any) -> None:
    """``more``: what this benchmark alone is told. Raises ``UsageError`` as ``check`` does, ``JobError`` when the GPU's
    memory is too small for the benchmark."""
    check(options)
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
