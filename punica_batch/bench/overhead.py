"""What adapters cost a token's latency: a batch without them, with one for all rows, with one for each, by rank.

The Punica paper measures throughput; this is the latency that a row sees from token to token, p50, p95 and p99, in
steps in which every row of the batch decodes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from punica_batch.bench.device import Ceilings, ceilings, free_memory, open_device
from punica_batch.bench.limits import limit_of, simulate
from punica_batch.bench.options import BenchOptions, Budget
from punica_batch.bench.popularity import popularity
from punica_batch.bench.record import Recorder, Spread, percentile
from punica_batch.bench.selection import Adapters
from punica_batch.bench.serving import SETTLE_STEPS, Rows, drop, start, steps_to_prefill
from punica_batch.bench.workbench import Workbench, workbench
from punica_batch.engine.engine import Engine
from punica_batch.errors import JobError
from punica_batch.types import JsonDict

ADAPTERS: tuple[Adapters, ...] = ("none", "identical", "distinct")
_PROMPT = 128


@dataclass(frozen=True, slots=True)
class _Sizes:
    batches: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: int


def run(options: BenchOptions) -> None:
    """A batch with more distinct adapters than the GPU has slots for is left out."""
    sizes = options.pick(
        full=_Sizes((1, 8, 32, 64, 128, 256), (8, 16, 64, 128), 200),
        quick=_Sizes((1, 32), (8, 64), 100),
        tiny=_Sizes((1, 3), (2, 5), 8),
    )
    recorder, budget = Recorder("overhead", options), options.budget()
    device = open_device(options.device)
    with workbench(options.model_shape, dtype=options.dtype, device=device, ranks=sizes.ranks) as bench:
        roof = ceilings(device, bench.model.dtype)
        for rank in sizes.ranks:
            _measure_rank(recorder, bench, roof, sizes, rank, budget)
            free_memory(device)
    draw(recorder)


def _measure_rank(
    recorder: Recorder, bench: Workbench, roof: Ceilings, sizes: _Sizes, rank: int, budget: Budget
) -> None:
    cap = max(sizes.batches)
    new = sizes.steps + 2 * SETTLE_STEPS + steps_to_prefill(_PROMPT * cap, cap, bench.step_tokens(cap))
    engine = bench.engine(
        cap=cap, longest=_PROMPT + new, adapters=bench.specs("adapter", cap, rank), distinct=cap, max_rank=rank
    )
    try:
        skipped = too_large = 0
        for batch in sizes.batches:
            plain = None
            for adapters in ADAPTERS:
                if adapters == "distinct" and batch > engine.settings.max_loras:
                    too_large += 1
                    continue
                if budget.is_spent:
                    skipped += 1
                    continue
                rows = _rows(bench, adapters, batch, new)
                times = sorted(token_seconds(engine, rows, sizes.steps))
                about: JsonDict = {"batch": batch, "adapters": adapters, "rank_of_adapters": rank}
                spread = _write(recorder, times, _limit(bench, roof, adapters, rank, rows, sizes.steps), about)
                if plain is None:
                    plain = spread
                else:
                    recorder.write("overhead", "%", 100 * (spread.median / plain.median - 1), **about)
        recorder.skipped(skipped)
        recorder.skipped(too_large, "an adapter for each row takes more memory than adapters get")
    finally:
        engine.close()


def token_seconds(engine: Engine, rows: Rows, steps: int) -> list[float]:
    """From token to token, over ``steps`` steps of a full batch. Raises ``JobError`` when a row was missing in one."""
    start(engine, rows)
    ends = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        ends.append(time.perf_counter())
    running = engine.stats().running
    if running < len(rows.new):
        raise JobError(f"{running} of {len(rows.new)} rows ran to the end: the steps are not alike")
    drop(engine, len(rows.new))
    return np.diff(ends).tolist()


def _rows(bench: Workbench, adapters: Adapters, batch: int, new: int) -> Rows:
    rng = np.random.default_rng(batch)
    prompts = [rng.integers(3, bench.config.vocab_size, _PROMPT).astype(np.int32) for _ in range(batch)]
    lora_ids: list[str | None] = [None] * batch
    if adapters != "none":
        lora_ids = [f"adapter-{i}" for i in popularity(adapters, batch).tolist()]
    return Rows(prompts, [new] * batch, lora_ids)


def _limit(bench: Workbench, roof: Ceilings, adapters: Adapters, rank: int, rows: Rows, steps: int) -> float:
    """Seconds a step, the mean of the ``steps`` that are timed: the rows grow with each."""
    batch = len(rows.new)
    which = None if adapters == "none" else popularity(adapters, batch)
    played = simulate([len(prompt) for prompt in rows.prompts], rows.new, batch, bench.step_tokens(batch), which)
    first = SETTLE_STEPS + next(i for i, step in enumerate(played) if step.pairs == 0)
    timed, sizes = played[first : first + steps], [bench.bytes_of_rank(rank)] * batch
    return limit_of(timed, bench.config, bench.dtype, roof, sizes).seconds / steps


def _write(recorder: Recorder, times: list[float], limit: float, about: JsonDict) -> Spread:
    spread = Spread.of(times)
    tails = {f"p{p}": round(1000 * percentile(times, p), 4) for p in (50, 95, 99)}
    recorder.write("token latency", "ms", spread.scaled(1000), limit=1000 * limit, headline=True, **about, **tails)
    return spread


def draw(recorder: Recorder) -> None:
    """Latency by batch at the rank asked for, and what adapters add to it at every rank."""
    from punica_batch.bench.figure import COLOURS, curve, figure, finish, limit_curve, log_axes

    latencies, overheads = recorder.select("token latency"), recorder.select("overhead")
    ranks = list(dict.fromkeys(line["parameters"]["rank_of_adapters"] for line in latencies))
    shown = recorder.options.rank if recorder.options.rank in ranks else (ranks or [0])[0]
    with figure(recorder, "Latency from token to token", 2) as (left, right):
        for adapters in ADAPTERS:
            lines = recorder.select("token latency", adapters=adapters, rank_of_adapters=shown)
            curve(left, lines, "batch", adapters, color=COLOURS[adapters])
        limit_curve(left, recorder.select("token latency", adapters="none", rank_of_adapters=shown), "batch")
        log_axes(left, y=False)
        finish(left, f"adapters of rank {shown}", "batch", "ms")
        for rank in ranks:
            for adapters, style in (("identical", "-"), ("distinct", ":")):
                points = recorder.select("overhead", adapters=adapters, rank_of_adapters=rank)
                curve(right, points, "batch", f"{adapters}, rank {rank}", linestyle=style)
        if overheads:
            log_axes(right, y=False)
        finish(right, "added by adapters", "batch", "% of the latency without")
