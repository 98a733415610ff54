"""One transformer layer with LoRA on all seven projections, by batch, length and popularity (Punica, figure 10)."""

from __future__ import annotations

import torch

from punica_batch.bench.add_on import segments_of
from punica_batch.bench.device import ceilings, open_device, time_step
from punica_batch.bench.figure import COLOURS, curve, figure, finish, limit_curve, log_axes
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import POPULARITIES, Popularity
from punica_batch.bench.record import Recorder
from punica_batch.bench.steps import ModelSteps


def run(options: BenchOptions) -> None:
    """Decode steps; some layers with weights, cache and adapters of their own in one graph, as µs a layer.

    Embedding and last norm, which all layers share, are in it: next to nothing.
    """
    device, dtype = open_device(options.device), getattr(torch, options.dtype)
    rows = options.pick(full=[1, 2, 4, 8, 16, 32, 64, 128], quick=[1, 16, 32, 64], tiny=[1, 4])
    lengths = options.pick(full=[512, 2048], quick=[512, 2048], tiny=[16, 32])
    layers = options.pick(full=8, quick=8, tiny=2)
    roof, recorder, budget = ceilings(device, dtype), Recorder("layer", options), options.budget()
    steps = ModelSteps(options, device, kv_tokens=max(rows) * max(lengths), adapters=max(rows), layers=layers)
    kinds: list[Popularity | None] = [None, *POPULARITIES]
    points = [(length, n, kind) for length in lengths for n in rows for kind in kinds]
    for length, n, kind in recorder.in_time(points, budget):
        segments, adapters = segments_of(kind, n, device)
        counts = [1] * n
        took = time_step(steps.step(counts, length, segments, head=False), device, seconds=0.1, graph=steps.capturable)
        limit = steps.limit(roof, counts, length, len(adapters), head=False) * 1e6 / layers
        recorder.write(
            "latency", "us", took.scaled(1e6 / layers), limit=limit, headline=n == 32 and length == 512,
            popularity=kind or "none", rows=n, length=length, attention=steps.note or "default",
        )  # fmt: skip
    draw(recorder)


def draw(recorder: Recorder) -> None:
    lengths = sorted({line["parameters"]["length"] for line in recorder.lines})
    with figure(recorder, "One layer of a decode step", max(1, len(lengths))) as axes:
        for each, length in zip(axes, lengths, strict=False):
            for kind in ("none", *POPULARITIES):
                lines = recorder.select("latency", length=length, popularity=kind)
                curve(each, lines, "rows", kind, color=COLOURS[kind])
            for kind, style in (("none", "--"), ("distinct", ":")):
                lines = recorder.select("latency", length=length, popularity=kind)
                limit_curve(each, lines, "rows", f"limit of the device, {kind}", linestyle=style)
            log_axes(each, y=False)
            each.set_ylim(bottom=0)
            finish(each, f"length {length}", "rows", "µs a layer")
