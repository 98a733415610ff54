"""SGMV's roofline: what it computes a byte moved, against what it computes a second (Punica, figure 7)."""

from __future__ import annotations

import numpy as np
import torch
from punica_batch_kernels.sgmv import backend_for

from punica_batch.bench.add_on import AddOn
from punica_batch.bench.device import Ceilings, ceilings, open_device, time_step
from punica_batch.bench.figure import COLOURS, figure, finish, log_axes
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import POPULARITIES
from punica_batch.bench.record import Recorder
from punica_batch.bench.shapes import shape_config


def run(options: BenchOptions) -> None:
    """Both launches over a hidden x hidden projection; bytes: weights once an adapter, x and y."""
    device, dtype = open_device(options.device), getattr(torch, options.dtype)
    rows = options.pick(full=[2**i for i in range(12)], quick=[1, 4, 16, 64, 256, 1024], tiny=[1, 4])
    most_adapters = options.pick(full=256, quick=64, tiny=4)
    layers = options.pick(full=64, quick=32, tiny=2)
    hidden = shape_config(options.model_shape).hidden_size
    roof, recorder, budget = ceilings(device, dtype), Recorder("roofline", options), options.budget()
    roof.write(recorder)
    add_on = AddOn([(hidden, (hidden,))], layers, [options.rank] * most_adapters, dtype, device)
    points = [(kind, n) for n in rows for kind in POPULARITIES if kind != "distinct" or n <= most_adapters]
    for kind, n in recorder.in_time(points, budget):
        turns, lengths = add_on.turns(kind, n)
        flop, moved = add_on.flop(lengths), add_on.moved(lengths)
        took = time_step(add_on.step(backend_for(device).add_lora, turns), device, seconds=0.1)
        recorder.write(
            "rate", "TFLOP/s", took.scaled(1 / (layers * len(turns))).rate(flop / 1e12),
            limit=flop / roof.seconds(moved, flop) / 1e12, popularity=kind, rows=n, intensity=round(flop / moved, 4),
        )  # fmt: skip
    draw(recorder)


def draw(recorder: Recorder) -> None:
    [copy, product] = [recorder.select(what)[0]["median"] * 1e12 for what in ("copy bandwidth", "matrix product")]
    roof = Ceilings(copy, product)
    with figure(recorder, "SGMV against the device's roof") as [axes]:
        for kind in POPULARITIES:
            lines = recorder.select("rate", popularity=kind)
            x = [line["parameters"]["intensity"] for line in lines]
            axes.plot(x, [line["median"] for line in lines], "o-", markersize=4, label=kind, color=COLOURS[kind])
        intensity = np.geomspace(0.1, 10 * roof.product / roof.copy, 100)
        limit = [min(roof.copy * at, roof.product) / 1e12 for at in intensity]
        label = f"{roof.copy / 1e12:.2f} TB/s, {roof.product / 1e12:.3g} TFLOP/s (measured)"
        axes.plot(intensity, limit, color="black", linestyle="--", lw=1, label=label)
        log_axes(axes)
        finish(axes, "shrink and expand together, by number of rows", "FLOP a byte", "TFLOP/s")
