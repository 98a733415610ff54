"""Throughput of the product's engine on the loads of ``popularity``, each figure beside its own limit.

Scheduling, sampling and detokenization count, and so does loading adapters; tokenization and Parquet do not. The limit
is what a load must move and compute, part after part (``limits``): an engine that overlaps the parts could pass it.
Where the rest goes, the timelines of a decode step and of a mixed one say.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from punica_batch.bench.clocks import Clocks
from punica_batch.bench.device import Ceilings, ceilings, free_memory, host_link, open_device
from punica_batch.bench.limits import Limit, ProductTable, limit_of, simulate
from punica_batch.bench.options import BenchOptions, Budget
from punica_batch.bench.popularity import LoadKind, popularity
from punica_batch.bench.record import Recorder, Spread, percentile
from punica_batch.bench.selection import Adapters, Selection
from punica_batch.bench.serving import Rows, Served, serve, steps_to_prefill
from punica_batch.bench.table import place
from punica_batch.bench.timeline import Timeline, decode_timeline, mixed_timeline
from punica_batch.bench.workbench import Workbench, workbench
from punica_batch.engine.engine import Engine
from punica_batch.errors import JobError
from punica_batch.types import AdapterSpec, JsonDict

_TIMELINE_STEPS = 16
_WARM = "warm"  # names of adapters that no measured row has


def run(options: BenchOptions, selection: Selection | None = None) -> None:
    """Raises ``JobError`` when a row of a load fails or an adapter was not loaded on its own."""
    selection = selection or Selection.of(options)
    weights = selection.weights
    # lines of the default values say nothing, as those from before there was a choice
    recorder = Recorder("engine", options, parameters={} if weights == "normal" else {"weights": weights})
    budget = options.budget()
    device = open_device(options.device)
    ceilings(device, getattr(torch, options.dtype)).write(recorder)
    recorder.write("host link", "GB/s", host_link(device) / 1e9)
    for ranks in selection.ranks:
        _measure_ranks(recorder, selection, ranks, device, budget)
        free_memory(device)  # that of the model, before there is another
    draw(recorder)


def _measure_ranks(
    recorder: Recorder, selection: Selection, ranks: tuple[int, ...], device: torch.device, budget: Budget
) -> None:
    options, weights = recorder.options, selection.weights
    made = workbench(
        options.model_shape, dtype=options.dtype, device=device, ranks=ranks, weights=weights,
        max_cap=max(selection.caps),
    )  # fmt: skip
    with made as bench:
        roofs = _Roofs(ceilings(device, bench.model.dtype), ProductTable.measure(bench.model), host_link(device))
        for cap in selection.caps:
            free_memory(device)  # what the measurements before took, or the last engine's cache
            _measure_cap(recorder, bench, roofs, selection, cap, budget)


def _measure_cap(
    recorder: Recorder, bench: Workbench, roofs: _Roofs, selection: Selection, cap: int, budget: Budget
) -> None:
    engine = _engine(bench, selection, cap)
    try:
        _Points(recorder, bench, roofs, selection, cap, engine).measure_all(budget)
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class _Roofs:
    """What was measured of the device: its ceilings, the model's products, bytes a second from the host."""

    ceilings: Ceilings
    table: ProductTable
    link: float


@dataclass(frozen=True, slots=True)
class _Points:
    """All that is measured at one batch cap, with one engine."""

    recorder: Recorder
    bench: Workbench
    roofs: _Roofs
    selection: Selection
    cap: int
    engine: Engine

    def measure_all(self, budget: Budget) -> None:
        for kind, adapters in self.recorder.in_time(self.selection.points(), budget):
            warm = _rows(self.bench, self.selection, kind, adapters, self.cap, _WARM)
            serve(self.engine, _warm_up(warm, self.cap, kind))
            rows = _rows(self.bench, self.selection, kind, adapters, self.cap, kind)
            with Clocks(self.bench.model.device) as clocks:
                served = serve(self.engine, rows)
            self._write(kind, adapters, rows, served, clocks.medians)
        kind = self.selection.loads[0]
        for adapters in self.recorder.in_time(self.selection.adapters, budget):
            self._write_timelines(kind, adapters)

    def _about(self, kind: LoadKind, adapters: Adapters) -> JsonDict:
        return {"load": kind, "cap": self.cap, "adapters": adapters, "ranks": _label(self.bench.ranks)}

    def _write(self, kind: LoadKind, adapters: Adapters, rows: Rows, served: Served, clocks: JsonDict) -> None:
        about, write = self._about(kind, adapters), self.recorder.write
        amount, unit = (served.rows, "rows/s") if kind == "label" else (served.new_tokens, "new tok/s")
        roof, products, link, loaded = self._limits(adapters, rows)
        if self.bench.model.device.type == "cuda" and served.bytes_copied < loaded:
            raise JobError(f"{adapters} adapters of {loaded} bytes, and only {served.bytes_copied} bytes were copied")
        limit = max(roof.seconds, link)
        write(
            "throughput", unit, amount / served.seconds, limit=amount / limit, headline=self.selection.share == 1,
            **about, rows=served.rows, seconds=round(served.seconds, 3),
            batched_tokens=self.engine.settings.max_num_batched_tokens, **clocks,
        )  # fmt: skip
        write("share of the limit", "%", 100 * limit / served.seconds, **about, of="bytes and operations")
        measured = max(products.seconds, link)
        write("share of the limit", "%", 100 * measured / served.seconds, **about, of="measured products")
        for part, seconds in (
            ("products", products.products), ("attention", products.attention), ("adapters", products.adapters),
        ):  # fmt: skip
            write("limit's part", "% of the time", 100 * seconds / served.seconds, **about, part=part)
        step_ms = np.sort(served.step_seconds * 1000).tolist()
        write("step", "ms", Spread.of(step_ms), **about, p95=round(percentile(step_ms, 95), 4))
        write("mixed steps", "%", 100 * float(served.mixed.mean()), **about, steps=len(step_ms))
        write(
            "adapters loaded", "GB", served.bytes_copied / 1e9, **about, adapters_loaded=served.adapters_loaded,
            preemptions=served.preemptions, graphs_recorded=served.graphs_recorded,
        )  # fmt: skip

    def _limits(self, adapters: Adapters, rows: Rows) -> tuple[Limit, Limit, float, int]:
        """By the roofline and by the measured products; seconds on the link and bytes of the load's adapters."""
        bench = self.bench
        which = None if adapters == "none" else popularity(adapters, len(rows.new))
        sizes = [bench.adapter_bytes(i) for i in range(len(rows.new))]
        budget = self.engine.settings.max_num_batched_tokens
        steps = simulate([len(prompt) for prompt in rows.prompts], rows.new, self.cap, budget, which)
        loaded = 0 if which is None else sum(sizes[i] for i in set(which.tolist()))
        roof = limit_of(steps, bench.config, bench.dtype, self.roofs.ceilings, sizes)
        products = limit_of(steps, bench.config, bench.dtype, self.roofs.ceilings, sizes, self.roofs.table)
        return roof, products, loaded / self.roofs.link, loaded

    def _write_timelines(self, kind: LoadKind, adapters: Adapters) -> None:
        """Of a full batch half way through its answers; in a mixed step, a typical prompt beside them."""
        rows = _rows(self.bench, self.selection, kind, adapters, self.cap, _WARM, self.cap)
        half_way = _half_way(rows, self.engine.settings.max_num_batched_tokens)
        typical = sorted(rows.prompts, key=len)[len(rows.prompts) // 2]
        arriving = Rows([*half_way.prompts[:-1], typical], half_way.new, rows.lora_ids)
        for name, measure, own in (("decode", decode_timeline, half_way), ("mixed", mixed_timeline, arriving)):
            try:
                timeline = measure(self.engine, own, _TIMELINE_STEPS)
            except JobError as error:  # a smaller GPU may not hold a full batch: its throughput stands
                print(f"engine: no timeline of {name} {kind} {adapters}: {error}", file=sys.stderr, flush=True)
                continue
            self._write_timeline(name, timeline, self._about(kind, adapters))

    def _write_timeline(self, name: str, timeline: Timeline, about: JsonDict) -> None:
        about = {"timeline": name, **about}
        write = self.recorder.write
        for part, seconds in sorted(timeline.kinds.items()):
            write("timeline", "ms", 1000 * seconds, **about, part=part)
        write("timeline", "ms", 1000 * timeline.busy, **about, part="busy")
        write("timeline", "ms", 1000 * timeline.gaps, **about, part="gaps")
        write(
            "timeline", "ms", 1000 * timeline.wall, **about, part="all", kernels=round(timeline.kernels),
            rows=timeline.rows, tokens=timeline.tokens,
        )  # fmt: skip
        if timeline.kinds:  # something was profiled: a GPU
            write("host share", "%", 100 * timeline.host_share, **about)


def _engine(bench: Workbench, selection: Selection, cap: int) -> Engine:
    """One engine serves all of a cap's points. Each point's adapters have names of their own: none is there already."""
    most = max(cap, *(selection.rows(kind, cap) for kind in selection.loads))
    loads = [_rows(bench, selection, kind, "none", cap, kind) for kind in selection.loads]
    tokens = selection.batched_tokens or bench.step_tokens(cap)
    steady = _half_way(_rows(bench, selection, selection.loads[0], "none", cap, _WARM, cap), tokens)
    specs = dict[str, AdapterSpec]()
    for use, adapters in product((*selection.loads, _WARM), selection.adapters):
        specs |= bench.specs(f"{use}-{adapters}", 0 if adapters == "none" else most)
    kinds = [kind for kind in selection.adapters if kind != "none"]
    distinct = max((len(set(popularity(kind, most).tolist())) for kind in kinds), default=0)
    warm = [_warm_up(rows, cap, kind) for rows, kind in zip(loads, selection.loads, strict=True)]
    longest = max(rows.longest for rows in (*loads, *warm, steady))
    return bench.engine(cap=cap, longest=longest, adapters=specs, distinct=distinct, batched_tokens=tokens)


def _rows(
    bench: Workbench, selection: Selection, kind: LoadKind, adapters: Adapters, cap: int, use: str, count: int = 0
) -> Rows:
    """A load's rows (or ``count`` of them) with the adapters that are named for ``use``."""
    count = count or selection.rows(kind, cap)
    lora_ids: list[str | None] = [None] * count
    if adapters != "none":
        lora_ids = [f"{use}-{adapters}-{i}" for i in popularity(adapters, count).tolist()]
    return Rows.of(kind, count, bench.config.vocab_size, lora_ids, selection.longest)


def _half_way(rows: Rows, batched_tokens: int) -> Rows:
    """The rows with half of their answers in their prompts by the middle of what a timeline takes, all of which they
    outlast."""
    total = sum(len(prompt) + new // 2 for prompt, new in zip(rows.prompts, rows.new, strict=True))
    to_come = steps_to_prefill(total, len(rows.new), batched_tokens) + 6 * _TIMELINE_STEPS
    lengths = [len(prompt) + new // 2 - to_come // 2 for prompt, new in zip(rows.prompts, rows.new, strict=True)]
    prompts = [np.resize(prompt, max(1, length)) for prompt, length in zip(rows.prompts, lengths, strict=True)]
    return Rows(prompts, [to_come] * len(prompts), rows.lora_ids)


def _warm_up(rows: Rows, cap: int, kind: LoadKind) -> Rows:
    """A load's beginning with short answers, most long prompts cut: rows come and go as in the load, so that its kinds
    of step are compiled and captured before it, and the batch thins out."""
    count = min(len(rows.new), 3 * cap)
    whole = [kind == "decode" or i < 16 or i % 8 == 0 for i in range(count)]
    prompts = [prompt if keep else prompt[:32] for keep, prompt in zip(whole, rows.prompts, strict=False)]
    return Rows(prompts, [1 + 7 * i % 61 for i in range(count)], rows.lora_ids[:count])


def _label(ranks: tuple[int, ...]) -> str:
    return "+".join(map(str, ranks))


def draw(recorder: Recorder) -> None:
    """Throughput of every point as a bar, its limit as a line above it."""
    from punica_batch.bench.figure import COLOURS, figure, finish

    lines = sorted(recorder.select("throughput"), key=place)
    units = list(dict.fromkeys(line["unit"] for line in lines))
    with figure(recorder, "The engine's throughput", max(1, len(units))) as axes:
        for each, unit in zip(axes, units, strict=False):
            chosen = [line for line in lines if line["unit"] == unit]
            parameters = [line["parameters"] for line in chosen]
            each.bar(
                range(len(chosen)),
                [line["median"] for line in chosen],
                color=[COLOURS[p["adapters"]] for p in parameters],
            )
            each.scatter(
                range(len(chosen)),
                [line["limit"] for line in chosen],
                marker="_",
                color="black",
                label="limit, part after part",
            )
            names = [
                f"{p['load']} {p['cap']} {p['adapters']} r{p['ranks']}"
                + (f"\n{p['weights']} weights" if "weights" in p else "")
                for p in parameters
            ]
            each.margins(y=0.2)  # for the legend
            each.set_xticks(range(len(chosen)), names, rotation=90, fontsize=6)
            finish(each, "", "load, batch cap, adapters, rank", unit)
