"""SGMV against what torch offers: a loop over adapters, and gathered weights in batched products (Punica, figure 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from punica_batch_kernels.sgmv import backend_for
from punica_batch_kernels.sgmv.baselines import GatherBmm, loop, row_slots
from punica_batch_kernels.sgmv.types import Segments

from punica_batch.bench.add_on import AddOn
from punica_batch.bench.device import ceilings, open_device, time_step
from punica_batch.bench.figure import curve, figure, finish, limit_curve, log_axes
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import POPULARITIES
from punica_batch.bench.record import Recorder
from punica_batch.bench.shapes import shape_config

COLOURS = {"sgmv": "#1f77b4", "gather-bmm": "#ff7f0e", "loop": "#d62728"}


def run(options: BenchOptions) -> None:
    """A hidden x hidden projection of each of some layers, in one graph: for the baselines, too, the host's time does
    not count. µs a projection."""
    device, dtype = open_device(options.device), getattr(torch, options.dtype)
    rows = options.pick(full=[1, 2, 4, 8, 16, 32, 64, 128, 256], quick=[1, 8, 32, 64], tiny=[1, 4])
    layers = options.pick(full=64, quick=32, tiny=2)
    hidden = shape_config(options.model_shape).hidden_size
    roof, recorder, budget = ceilings(device, dtype), Recorder("sgmv", options), options.budget()
    add_on = AddOn([(hidden, (hidden,))], layers, [options.rank] * max(rows), dtype, device)
    gathered = [GatherBmm(group) for group in add_on.groups]
    points = [(name, kind, n) for name in COLOURS for kind in POPULARITIES for n in rows]
    for name, kind, n in recorder.in_time(points, budget):
        turns, lengths = add_on.turns(kind, n)
        took = time_step(_step(name, add_on, gathered, turns), device, seconds=0.1)
        limit = 1e6 * roof.seconds(add_on.moved(lengths, activations=False), add_on.flop(lengths))
        recorder.write(
            "latency", "us", took.scaled(1e6 / (layers * len(turns))), limit=limit, headline=n == max(rows),
            provider=name, popularity=kind, rows=n,
        )  # fmt: skip
    draw(recorder)


def _step(name: str, add_on: AddOn, gathered: list[GatherBmm], turns: Sequence[Segments]) -> Callable[[], None]:
    if name == "sgmv":
        return add_on.step(backend_for(add_on.device).add_lora, turns)
    [(x, y)] = add_on.operands(turns[0].seg_indptr[-1])
    slots = [row_slots(segments).to(add_on.device) for segments in turns]

    def in_a_loop() -> None:
        for segments, group in product(turns, add_on.groups):
            loop(y, x, group, segments)

    def by_gather_bmm() -> None:
        for own, each in product(slots, gathered):
            each.add(y, x, own)

    return in_a_loop if name == "loop" else by_gather_bmm


def draw(recorder: Recorder) -> None:
    with figure(recorder, "Adding adapters to one projection", len(POPULARITIES)) as axes:
        for each, kind in zip(axes, POPULARITIES, strict=True):
            for name, colour in COLOURS.items():
                curve(each, recorder.select("latency", provider=name, popularity=kind), "rows", name, color=colour)
            limit_curve(each, recorder.select("latency", provider="sgmv", popularity=kind), "rows")
            log_axes(each)
            finish(each, kind, "rows", "µs a projection")
