"""SGMV by rank, and a mix of ranks, over one projection (Punica, figure 9)."""

from __future__ import annotations

import torch
from punica_batch_kernels.sgmv import backend_for

from punica_batch.bench.add_on import MOST_PRODUCTS, AddOn
from punica_batch.bench.device import ceilings, free_memory, open_device, time_step
from punica_batch.bench.figure import COLOURS, figure, finish
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import POPULARITIES
from punica_batch.bench.record import Recorder
from punica_batch.bench.shapes import shape_config

RANKS = (8, 16, 32, 64, 128)


def run(options: BenchOptions) -> None:
    """Each rank alone; ``mix``: the ranks in turn over the slots; ``8 beside 128``: rank 8 alone in an engine that is
    prepared for 128, which must cost what rank 8 costs."""
    device, dtype = open_device(options.device), getattr(torch, options.dtype)
    rows = options.pick(full=[1, 8, 32, 64, 128, 256], quick=[32], tiny=[4])
    layers = options.pick(full=32, quick=32, tiny=2)
    ranks = options.pick(full=RANKS, quick=RANKS, tiny=(1, 4))
    low, high = ranks[0], ranks[-1]
    # name -> ranks of the slots in turn, and what the kernels are prepared for
    cases: dict[str, tuple[tuple[int, ...], int]] = {str(rank): ((rank,), rank) for rank in ranks}
    cases |= {"mix": (ranks, high), f"{low} beside {high}": ((low,), high)}
    hidden = shape_config(options.model_shape).hidden_size
    roof, recorder, budget = ceilings(device, dtype), Recorder("rank", options), options.budget()
    for name, (turn, max_rank) in recorder.in_time(cases.items(), budget):
        # with one adapter for all rows, each turn of a mix passes over a slot of every rank
        needed = max(rows) if len(turn) == 1 else max(max(rows), len(turn) * MOST_PRODUCTS // layers)
        slots = [turn[i % len(turn)] for i in range(needed)]
        add_on = AddOn([(hidden, (hidden,))], layers, slots, dtype, device, max_rank)
        for n in rows:
            for kind in POPULARITIES:
                turns, lengths = add_on.turns(kind, n)
                took = time_step(add_on.step(backend_for(device).add_lora, turns), device, seconds=0.1)
                recorder.write(
                    "latency", "us", took.scaled(1e6 / (layers * len(turns))),
                    headline=n == 32 and kind in ("distinct", "identical"),
                    limit=1e6 * roof.seconds(add_on.moved(lengths, activations=False), add_on.flop(lengths)),
                    ranks=name, popularity=kind, rows=n,
                )  # fmt: skip
        del add_on
        free_memory(device)
    draw(recorder)


def draw(recorder: Recorder) -> None:
    shown = sorted({line["parameters"]["rows"] for line in recorder.lines})
    with figure(recorder, "Adding adapters to one projection, by rank", max(1, len(shown))) as axes:
        for each, rows in zip(axes, shown, strict=False):
            names = list(dict.fromkeys(line["parameters"]["ranks"] for line in recorder.select("latency", rows=rows)))
            for i, kind in enumerate(POPULARITIES):
                lines = recorder.select("latency", rows=rows, popularity=kind)
                x = [j + 0.2 * (i - 1.5) for j in range(len(lines))]
                each.bar(x, [line["median"] for line in lines], 0.2, color=COLOURS[kind], label=kind)
                each.plot(x, [line["limit"] for line in lines], "k_", label="limit of the device" if i == 0 else None)
            each.set_xticks(range(len(names)), names, fontsize=7)
            finish(each, f"{rows} rows", "rank", "µs a projection")
