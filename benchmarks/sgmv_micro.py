"""Times the SGMV add-on of a whole Llama-2-7B step (4 groups x 32 layers) in one CUDA graph, against its bytes.

    python benchmarks/sgmv_micro.py [--rank 16] [--rows 32 64 128 256] [--bandwidth 4.21] [--products] [--eager]

The limit is what must move through device memory, at the copy bandwidth given in TB/s: at decode each adapter's
weights once (activations stay in the cache), at prefill x read once, y read and written. ``--products`` also times the
step's matrix products without and with the add-on, in one graph each: what the adapters cost where it counts; with it
once after the products and once beside them. ``--eager`` times the host: launches outside of a graph.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from punica_batch_kernels.sgmv import triton_backend
from punica_batch_kernels.sgmv.linear import OrderedLinear, base_first
from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.tiles import RowTiles
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights

HIDDEN, INTERMEDIATE, LAYERS = 4096, 11008, 32
GROUPS = ((HIDDEN, (HIDDEN,) * 3), (HIDDEN, (HIDDEN,)), (HIDDEN, (INTERMEDIATE,) * 2), (INTERMEDIATE, (HIDDEN,)))
KINDS = ("identical", "skewed", "uniform", "distinct")
CUDA = torch.device("cuda")


@dataclass
class Model:
    groups: list[LoraGroup]  # layer by layer, as GROUPS orders them
    tables: SlotTables
    adapter_bytes: int


def make_model(rank: int, slots: int, dtype: torch.dtype) -> Model:
    """Every slot holds its own random weights in a buffer of its own, packed as the engine does."""
    per_layer = sum(rank * (into * len(widths) + sum(widths)) for into, widths in GROUPS)
    offsets = [(0, *np.cumsum(widths).tolist()) for _, widths in GROUPS]
    groups = [LoraGroup(into, offsets[i], [None] * slots) for _ in range(LAYERS) for i, (into, _) in enumerate(GROUPS)]
    for slot in range(slots):
        flat = torch.empty(per_layer * LAYERS, dtype=dtype, device=CUDA).normal_(std=0.02)
        pieces = iter_pieces(flat)
        for i, group in enumerate(groups):
            widths = GROUPS[i % len(GROUPS)][1]
            a = pieces(rank * len(widths), group.in_features)
            group.slots[slot] = SlotWeights(a, tuple(pieces(rank, w).t() for w in widths), (rank,) * len(widths))
    tables = SlotTables(groups, rank, dtype, CUDA)
    return Model(groups, tables, per_layer * LAYERS * dtype.itemsize)


def iter_pieces(flat: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    start = 0

    def piece(rows: int, columns: int) -> torch.Tensor:
        nonlocal start
        start += rows * columns
        return flat[start - rows * columns : start].view(rows, columns)

    return piece


def lengths_of(kind: str, rows: int) -> list[int]:
    """Rows of each adapter (the popularities of the Punica paper, section 7)."""
    if kind == "identical":
        return [rows]
    if kind == "distinct":
        return [1] * rows
    adapters = math.ceil(math.sqrt(rows))
    if kind == "uniform":
        return [rows // adapters + (i < rows % adapters) for i in range(adapters)]
    weights = 1.5 ** -np.arange(adapters, dtype=float)
    which = np.random.default_rng(7).choice(adapters, rows, p=weights / weights.sum())
    return [n for n in np.bincount(which, minlength=adapters).tolist() if n]


def segments_for(lengths: list[int], block_m: int | None = None) -> Segments:
    starts, slots = [0, *np.cumsum(lengths).tolist()], list(range(len(lengths)))
    if block_m is None:
        return Segments.build(starts, slots, CUDA)
    return Segments.build(starts, slots, tiles=(RowTiles.build(starts, slots, CUDA, block_m),))


def activations(rows: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    xs = [torch.randn(rows, into, device=CUDA).to(dtype) for into, _ in GROUPS]
    ys = [torch.zeros(rows, sum(widths), dtype=dtype, device=CUDA) for _, widths in GROUPS]
    return xs, ys


def graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median of half a second of replays after a warm-up."""
    start = time.perf_counter()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    repeats = min(max(5, int(1.5 / (time.perf_counter() - start))), 25)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def add_on(model: Model, segments: Segments, rows: int, dtype: torch.dtype) -> Callable[[], None]:
    xs, ys = activations(rows, dtype)

    def step() -> None:
        for i, group in enumerate(model.groups):
            triton_backend.add_lora(ys[i % len(GROUPS)], xs[i % len(GROUPS)], group, segments)

    return step


def products(
    weights: list[torch.Tensor],
    rows: int,
    dtype: torch.dtype,
    model: Model | None = None,
    segments: Segments | None = None,
    order: str = "first",
) -> Callable[[], None]:
    """``order``: of the base products, "first" or "beside"."""
    xs, _ = activations(rows, dtype)
    beside = OrderedLinear(CUDA).side_by_side

    def step() -> None:
        for i, weight in enumerate(weights):
            x, base = xs[i % len(GROUPS)], partial(functional.linear, weight=weight)
            if model is None or segments is None:
                base(x)
            else:
                (base_first if order == "first" else beside)(base, x, model.groups[i], segments)

    return step


def eager_us(model: Model, segments: Segments, rows: int, dtype: torch.dtype) -> float:
    """Host time of a launch in µs, with what add_lora does around it."""
    step = add_on(model, segments, rows, dtype)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    assert segments.tiles is not None
    return statistics.median(times) * 1e6 / (2 * len(model.groups) * len(segments.tiles))


def limit_ms(model: Model, lengths: list[int], prefill: bool, bandwidth: float, itemsize: int) -> float:
    moved = len(lengths) * model.adapter_bytes
    if prefill:
        columns = sum(into + 2 * sum(widths) for into, widths in GROUPS)
        moved += sum(lengths) * columns * itemsize * LAYERS
    return moved / bandwidth / 1e9


def cases(rows: list[int]) -> Iterator[tuple[str, int, str, list[int]]]:
    for m in rows:
        for kind in KINDS:
            yield "decode", m, kind, lengths_of(kind, m)
    for kind, lengths in (("1 x 4096", [4096]), ("8 x 512", [512] * 8), ("64 x 64", [64] * 64)):
        yield "prefill", 4096, kind, lengths
    yield "mixed", 2304, "8 x 256 + 256", [256] * 8 + [1] * 248


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--bandwidth", type=float, default=4.21, help="TB/s, read + written")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model = make_model(args.rank, max(256, *args.rows), dtype)
    weights = []
    if args.products:
        shapes = [(sum(widths), into) for into, widths in GROUPS] * LAYERS
        weights = [torch.empty(shape, dtype=dtype, device=CUDA).normal_(std=0.02) for shape in shapes]
    print(f"{torch.cuda.get_device_name()}, rank {args.rank}, {args.dtype}; ms a step of {LAYERS} layers")
    columns = ["phase", "rows", "adapters", "tiles", "limit", "add-on", "x limit"]
    columns += ["products", "+ add-on", "beside"] * args.products + ["µs a launch"] * args.eager
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for phase, rows, kind, lengths in cases(args.rows):
        segments = segments_for(lengths)
        limit = limit_ms(model, lengths, phase != "decode", args.bandwidth, dtype.itemsize)
        took = milliseconds(graph_of(add_on(model, segments, sum(lengths), dtype)))
        assert segments.tiles is not None
        tiles = " + ".join(f"{t.entries.shape[0]} of {t.block_m}" for t in segments.tiles)
        line = f"| {phase} | {rows} | {kind} | {tiles} | {limit:.2f} | {took:.2f} | {took / limit:.2f} |"
        if args.products:
            steps = [products(weights, rows, dtype)]
            steps += [products(weights, rows, dtype, model, segments, order) for order in ("first", "beside")]
            line += "".join(f" {milliseconds(graph_of(step)):.2f} |" for step in steps)
        if args.eager:
            line += f" {eager_us(model, segments, sum(lengths), dtype):.1f} |"
        print(line, flush=True)


if __name__ == "__main__":
    main()
