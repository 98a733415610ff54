"""What batching gains: latency of a prefill and of a decode step by batch size (Punica, figure 1)."""

from __future__ import annotations

import torch

from punica_batch.bench.add_on import segments_of
from punica_batch.bench.device import ceilings, open_device, time_step
from punica_batch.bench.figure import curve, figure, finish, limit_curve, log_axes
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.record import Recorder
from punica_batch.bench.shapes import shape_config
from punica_batch.bench.steps import ModelSteps, memory_for
from punica_batch.models.config import DTYPE_BYTES

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c")


def run(options: BenchOptions) -> None:
    """Whole steps of the base model, embedding to logits, as ms, in a graph each."""
    device, dtype = open_device(options.device), getattr(torch, options.dtype)
    rows = options.pick(full=[1, 2, 4, 8, 16, 32, 64, 128, 256], quick=[1, 8, 32, 128], tiny=[1, 4])
    lengths = options.pick(full=[128, 512, 1536], quick=[128, 512], tiny=[16, 32])
    most_prefill = options.pick(full=32, quick=8, tiny=4)
    roof, recorder, budget = ceilings(device, dtype), Recorder("batching", options), options.budget()
    kv_tokens = fitting_tokens(options, device, max(rows) * max(lengths), adapters=0)
    steps = ModelSteps(options, device, kv_tokens=kv_tokens, adapters=0)
    points = [("decode", n, length) for length in lengths for n in rows]
    points += [("prefill", n, length) for length in lengths for n in rows if n <= most_prefill]
    points = [(phase, n, length) for phase, n, length in points if n * length <= kv_tokens]
    for phase, n, length in recorder.in_time(points, budget):
        counts = [1 if phase == "decode" else length] * n
        segments, _ = segments_of(None, sum(counts), device)
        took = time_step(steps.step(counts, length, segments), device, seconds=0.3, graph=steps.capturable)
        recorder.write(
            "latency", "ms", took.scaled(1e3), limit=1e3 * steps.limit(roof, counts, length, 0),
            headline=n in (1, 32) and length == 512, phase=phase, rows=n, length=length,
            attention=steps.note or "default",
        )  # fmt: skip
    draw(recorder)


def fitting_tokens(options: BenchOptions, device: torch.device, wanted: int, *, adapters: int) -> int:
    """Tokens of KV cache that fit beside the model and ``adapters`` on all seven projections, ``wanted`` at most."""
    config = shape_config(options.model_shape)
    itemsize = DTYPE_BYTES[options.dtype]
    widths = sum(out + into for name, (out, into) in config.lora_modules().items() if ".layers." in name)
    room = memory_for(device) - (config.num_parameters() + adapters * options.rank * widths) * itemsize
    return max(1, min(wanted, room // (2 * config.num_hidden_layers * config.kv_size * itemsize)))


def draw(recorder: Recorder) -> None:
    lengths = sorted({line["parameters"]["length"] for line in recorder.lines})
    with figure(recorder, "Latency of a step", 2) as axes:
        for each, phase in zip(axes, ("prefill", "decode"), strict=True):
            for length, colour in zip(lengths, _COLOURS, strict=False):
                lines = recorder.select("latency", phase=phase, length=length)
                curve(each, lines, "rows", f"length {length}", color=colour)
                limit_curve(each, lines, "rows", f"limit of the device, {length}", color=colour)
            log_axes(each)
            finish(each, phase, "sequences", "ms a step")
