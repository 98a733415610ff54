"""Fills the table that the SGMV kernels look their configurations up in, for the GPU at hand."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from punica_batch_kernels.sgmv import tuned

from punica_batch.bench.device import open_device
from punica_batch.bench.figure import COLOURS, figure, finish, log_axes
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.record import Recorder
from punica_batch.bench.shapes import shape_config
from punica_batch.errors import UsageError
from punica_batch.models.config import ModelConfig
from punica_batch.models.lora import FUSED_PROJECTIONS

Shape = tuple[int, tuple[int, ...]]

_MAX_COMPILERS = 16


def run(options: BenchOptions) -> None:
    """Writes ``sgmv-<gpu>.json`` beside the results, and says where the kernels look for it.

    Raises ``UsageError`` on a CPU: its kernels have no such table.
    """
    device, dtype = open_device(options.device), getattr(torch, options.dtype)
    if device.type != "cuda":
        raise UsageError("bench tune measures kernels that run on a GPU only: leave out --device cpu")
    from punica_batch_kernels.sgmv import tuning

    ranks = options.pick(full=(8, 16, 32, 64, 128), quick=(options.rank,), tiny=(options.rank,))
    rows = options.pick(full=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048], quick=[1, 32, 256], tiny=[1, 4])
    shapes = layer_shapes(shape_config(options.model_shape))
    recorder, budget, entries = Recorder("tune", options), options.budget(), []
    _compile_ahead(shapes, ranks, rows, dtype)
    for entry in tuning.tune(shapes, ranks, rows, dtype, budget.left):
        entries.append(entry)
        recorder.write(
            "latency", "us", entry["microseconds"], rule=entry["rule_microseconds"], rank=entry["max_rank"],
            tile_rows=entry["block_m"], tiles=entry["num_tiles"], in_features=entry["in_features"],
            out_features=sum(entry["widths"]),
        )  # fmt: skip
    name = tuned.device_name(device)
    path = options.results / f"sgmv-{name}.json"
    about = recorder.lines[0] if recorder.lines else {}
    tuned.save_table(entries, path, f"{about.get('gpu')}, {about.get('versions')}, commit {about.get('commit')}")
    print(f"tune: wrote {path}; the kernels read {tuned.FOLDER / f'{name}.json'}", file=sys.stderr, flush=True)
    draw(recorder)


def layer_shapes(config: ModelConfig) -> list[Shape]:
    """A layer's fused groups: (in features, out features of each slice)."""
    modules = config.lora_modules()
    fused = [[modules[f"model.layers.0.{name}"] for name in names] for names in FUSED_PROJECTIONS.values()]
    return [(slices[0][1], tuple(out for out, _ in slices)) for slices in fused]


def _compile_ahead(shapes: Sequence[Shape], ranks: Sequence[int], rows: Sequence[int], dtype: torch.dtype) -> None:
    """In processes side by side: compiling takes far longer than measuring."""
    from punica_batch_kernels.sgmv import tuning

    parts = min(os.cpu_count() or 1, _MAX_COMPILERS)
    with ProcessPoolExecutor(parts, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(tuning.compile_ahead, shapes, ranks, rows, dtype, part, parts) for part in range(parts)]
        for job in jobs:
            job.result()


def draw(recorder: Recorder) -> None:
    with figure(recorder, "Kernel configurations: measured against the rule") as [axes]:
        lines = recorder.select("latency")
        took = [line["median"] for line in lines]
        rule = [line["parameters"]["rule"] for line in lines]
        axes.plot(rule, took, "o", markersize=4, color=COLOURS["identical"], label="entries of the table")
        ends = [min(rule, default=1), max(rule, default=1)]
        axes.plot(ends, ends, color="black", linestyle="--", lw=1, label="as the rule")
        log_axes(axes)
        finish(axes, "shrink and expand of one group", "µs by the rule", "µs as tuned")
