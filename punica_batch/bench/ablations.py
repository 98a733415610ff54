"""What the Punica paper did not take apart: split-K, tensor cores for single rows, the largest batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from punica_batch_kernels.sgmv import backend_for
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, RowTiles
from punica_batch_kernels.sgmv.types import Segments

from punica_batch.bench.add_on import AddOn, segments_of
from punica_batch.bench.batching import fitting_tokens
from punica_batch.bench.device import Ceilings, ceilings, free_memory, open_device, time_step
from punica_batch.bench.figure import COLOURS, curve, figure, finish, limit_curve, log_axes
from punica_batch.bench.options import BenchOptions, Budget
from punica_batch.bench.popularity import Popularity
from punica_batch.bench.record import Recorder
from punica_batch.bench.shapes import shape_config
from punica_batch.bench.steps import ModelSteps

_LENGTH = 128  # tokens of each row in the steps of growing batches


def run(options: BenchOptions) -> None:
    device, dtype = open_device(options.device), getattr(torch, options.dtype)
    roof, recorder, budget = ceilings(device, dtype), Recorder("ablations", options), options.budget()
    measure_add_on(recorder, device, roof, budget)
    free_memory(device)
    measure_batches(recorder, device, roof, budget)
    draw(recorder)


def measure_add_on(recorder: Recorder, device: torch.device, roof: Ceilings, budget: Budget) -> None:
    """Over a hidden x hidden projection, where every row has an adapter of its own and where all have the same: SGMV as
    it is, and with one thing changed. µs a projection."""
    options = recorder.options
    rows = options.pick(full=[1, 4, 16, 32, 64, 128, 256], quick=[16, 64], tiny=[1, 4])
    layers = options.pick(full=64, quick=32, tiny=2)
    hidden = shape_config(options.model_shape).hidden_size
    add_on = AddOn([(hidden, (hidden,))], layers, [options.rank] * max(rows), getattr(torch, options.dtype), device)
    add_lora = backend_for(device).add_lora
    kinds: tuple[Popularity, ...] = ("distinct", "identical")
    for kind, n in recorder.in_time(list(product(kinds, rows)), budget):
        turns, lengths = add_on.turns(kind, n)
        limit = 1e6 * roof.seconds(add_on.moved(lengths, activations=False), add_on.flop(lengths))
        variants = {"as it is": (turns, False), "split-K off": (turns, True)}
        if kind == "distinct":
            variants["tensor cores off"] = ([with_tiles(segments, PER_ROW) for segments in turns], False)
            variants["tensor cores on"] = ([with_tiles(segments, GROUPED) for segments in turns], False)
        for name, (given, unsplit) in variants.items():
            took = time_step(add_on.step(add_lora, given, unsplit=unsplit), device, seconds=0.1)
            recorder.write(
                "add-on", "us", took.scaled(1e6 / (layers * len(turns))), limit=limit, headline=n == 64,
                variant=name, popularity=kind, rows=n,
            )  # fmt: skip


def with_tiles(segments: Segments, block_m: int) -> Segments:
    """The same segments for the kernels of one family, whatever the rule would choose; as they are on a CPU, whose
    kernels know no families."""
    if not segments.tiles:
        return segments
    device = segments.tiles[0].entries.device
    return replace(segments, tiles=(RowTiles.build(segments.seg_indptr, segments.lora_indices, device, block_m),))


def measure_batches(recorder: Recorder, device: torch.device, roof: Ceilings, budget: Budget) -> None:
    """Tokens a second of decode steps of growing batches, without adapters, with few, and with one a row."""
    options = recorder.options
    rows = options.pick(full=[8, 16, 32, 64, 128, 256, 512], quick=[8, 32, 128, 256], tiny=[2, 4])
    if budget.is_spent:
        recorder.skipped(len(rows))
        return
    slots = max(rows)
    kinds: tuple[Popularity | None, ...] = (None, "uniform", "distinct")
    kv_tokens = fitting_tokens(options, device, slots * _LENGTH, adapters=slots)
    steps = ModelSteps(options, device, kv_tokens=kv_tokens, adapters=slots)
    points = [(n, kind) for n in rows if n * _LENGTH <= kv_tokens for kind in kinds]
    for n, kind in recorder.in_time(points, budget):
        segments, lengths = segments_of(kind, n, device)
        took = time_step(steps.step([1] * n, _LENGTH, segments), device, seconds=0.2, graph=steps.capturable)
        recorder.write(
            "decode rate", "tok/s", took.rate(n), limit=n / steps.limit(roof, [1] * n, _LENGTH, len(lengths)),
            headline=True, popularity=kind or "none", rows=n, length=_LENGTH,
        )  # fmt: skip


def draw(recorder: Recorder) -> None:
    with figure(recorder, "Ablations", 3) as [distinct, identical, batches]:
        for axes, kind in ((distinct, "distinct"), (identical, "identical")):
            lines = recorder.select("add-on", popularity=kind)
            for name in dict.fromkeys(line["parameters"]["variant"] for line in lines):
                curve(axes, recorder.select("add-on", popularity=kind, variant=name), "rows", name)
            limit_curve(axes, recorder.select("add-on", popularity=kind, variant="as it is"), "rows")
            log_axes(axes)
            finish(axes, f"add-on, {kind}", "rows", "µs a projection")
        for kind, style in (("none", "--"), ("uniform", "-."), ("distinct", ":")):
            lines = recorder.select("decode rate", popularity=kind)
            curve(batches, lines, "rows", kind, color=COLOURS[kind])
            limit_curve(batches, lines, "rows", f"limit of the device, {kind}", linestyle=style)
        log_axes(batches)
        finish(batches, f"decode step, length {_LENGTH}", "batch", "tokens a second")
