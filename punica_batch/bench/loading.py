"""Cold start: adapters that no one has seen before, from the page cache and from disk.

For each number of them: the time to each one's first token when a row of each arrives at once, the rate at which their
bytes reach the device meanwhile, and what a batch that decodes without adapters loses while as many others load.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from punica_batch.bench.device import free_memory, host_link, open_device, synchronize
from punica_batch.bench.options import BenchOptions, Budget
from punica_batch.bench.record import Recorder, Spread
from punica_batch.bench.serving import SETTLE_STEPS, Rows, add, drop, start
from punica_batch.bench.workbench import FOLDERS, Workbench, workbench
from punica_batch.engine.engine import Engine
from punica_batch.errors import JobError
from punica_batch.types import AdapterSpec, JsonDict

PLACES = ("page cache", "disk")
KNOWN = "page cache, digests known"
_PROMPT = 32
_BATCH = 32  # rows that decode while others' adapters load
_ASKED_AHEAD = 32  # adapters that are asked for at a time then
_DISK_SHARE = 0.5  # of what is free, that copies of adapters may take


@dataclass(frozen=True, slots=True)
class _Sizes:
    """``points``: (adapters, rank); ``cap`` rows at a time; ``steps`` to time the undisturbed batch over."""

    points: tuple[tuple[int, int], ...]
    cap: int
    steps: int


def run(options: BenchOptions) -> None:
    """In the page cache eight folders stand under all names, each name loaded on its own; on disk each has its own
    files, as many as half the free space holds, whose pages are dropped before. Every load digests its file, but for a
    point of its own, ``KNOWN``, as a job that comes again has it."""
    sizes = options.pick(
        full=_Sizes(((1, 16), (32, 16), (256, 16), (1024, 4)), 256, 100),
        quick=_Sizes(((1, 16), (32, 16), (256, 16), (1024, 4)), 256, 40),
        tiny=_Sizes(((1, 5), (4, 2)), 4, 4),
    )
    recorder, budget = Recorder("loading", options), options.budget()
    device = open_device(options.device)
    ranks = tuple(dict.fromkeys(rank for _, rank in sizes.points))
    with workbench(options.model_shape, dtype=options.dtype, device=device, ranks=ranks) as bench:
        link = host_link(device)
        for rank in ranks:
            counts = [count for count, own in sizes.points if own == rank]
            _measure_rank(recorder, bench, sizes, rank, counts, link, budget)
            free_memory(device)
    draw(recorder)


def _measure_rank(
    recorder: Recorder, bench: Workbench, sizes: _Sizes, rank: int, counts: Sequence[int], link: float, budget: Budget
) -> None:
    _measure_unknown(recorder, bench, sizes, rank, counts, link, budget)
    free_memory(bench.model.device)  # that of an engine, before there is another
    if not budget.is_spent:
        _measure_known(recorder, bench, sizes, rank, max(counts), link)


def _measure_unknown(
    recorder: Recorder, bench: Workbench, sizes: _Sizes, rank: int, counts: Sequence[int], link: float, budget: Budget
) -> None:
    with (
        _specs(bench, rank, counts, on_disk=not recorder.options.quick) as specs,
        _engine(bench, sizes, rank, specs, trust_stamps=False) as engine,
    ):
        skipped = 0
        for (place, count, use), group in specs.items():
            if budget.is_spent:
                skipped += 1
                continue
            about: JsonDict = {"adapters": len(group), "asked": count, "rank_of_adapters": rank, "from": place}
            if place == "disk":
                _drop_pages(group.values())
            if use == "first tokens":
                _write_first_tokens(recorder, engine, bench, list(group), link, about)
            else:
                lost = lost_share(engine, bench, list(group), sizes.steps)
                recorder.write("throughput lost while loading", "%", 100 * lost, **about)
        recorder.skipped(skipped)


def _measure_known(recorder: Recorder, bench: Workbench, sizes: _Sizes, rank: int, count: int, link: float) -> None:
    """As the page cache's first tokens, for files that an earlier run has digested."""
    before, names = bench.specs(f"before-{rank}", FOLDERS, rank), bench.specs(f"{KNOWN}-{rank}", count, rank)
    specs: Specs = {(KNOWN, FOLDERS, "before"): before, (KNOWN, count, "first tokens"): names}
    with _engine(bench, sizes, rank, specs, trust_stamps=True) as engine:
        first_tokens(engine, bench, list(before))
        about: JsonDict = {"adapters": count, "asked": count, "rank_of_adapters": rank, "from": KNOWN}
        _write_first_tokens(recorder, engine, bench, list(names), link, about)


@contextmanager
def _engine(bench: Workbench, sizes: _Sizes, rank: int, specs: Specs, *, trust_stamps: bool) -> Iterator[Engine]:
    adapters = {name: spec for group in specs.values() for name, spec in group.items()}
    longest = _PROMPT + 2 * sizes.steps + 1000
    engine = bench.engine(
        cap=sizes.cap, longest=longest, adapters=adapters, distinct=sizes.cap, max_rank=rank, trust_stamps=trust_stamps
    )
    try:
        yield engine
    finally:
        engine.close()


def _write_first_tokens(
    recorder: Recorder, engine: Engine, bench: Workbench, names: Sequence[str], link: float, about: JsonDict
) -> None:
    before = engine.lora_store.stats
    seconds = first_tokens(engine, bench, names)
    after = engine.lora_store.stats
    copied = after.bytes_copied - before.bytes_copied
    least = len(names) * bench.bytes_of_rank(about["rank_of_adapters"])
    if copied < least and engine.runner.kv_cache.device.type == "cuda":
        raise JobError(f"{copied:,} bytes of adapters were copied in place of {least:,}: the figure would not count")
    first, last = min(seconds), max(seconds)
    recorder.write("time to first token", "s", Spread.of(seconds), headline=True, first=first, last=last, **about)
    recorder.write("adapters loaded", "1/s", (after.adapters - before.adapters) / last, **about)
    if copied:
        recorder.write("copied to the device", "GB/s", copied / last / 1e9, limit=link / 1e9, headline=True, **about)


def first_tokens(engine: Engine, bench: Workbench, names: Sequence[str]) -> list[float]:
    """Seconds from the arrival of a row of each adapter, all at once, to the row's only token.

    Raises ``JobError`` when a row fails.
    """
    synchronize(engine.runner.kv_cache.device)
    began = time.perf_counter()
    add(engine, _rows(bench, len(names), 1, names))
    seconds = []
    while engine.has_work:
        results = engine.step()
        now = time.perf_counter() - began
        for result in results:
            if result.error is not None:
                raise JobError(f"row {result.row} failed: {result.error}")
        seconds += [now] * len(results)
    return seconds


def lost_share(engine: Engine, bench: Workbench, names: Sequence[str], steps: int) -> float:
    """Of the throughput of a batch without adapters that decodes, what it loses while ``names`` load."""
    rows = min(_BATCH, engine.settings.max_num_seqs)
    start(engine, _rows(bench, rows, engine.settings.max_model_len - _PROMPT - 1, [None] * rows))
    try:
        alone = _steps_of(engine, iter(range(steps)))
        beside = _steps_of(engine, _ask(engine, names))
        return 1 - alone / beside
    finally:
        drop(engine, rows)


def _steps_of(engine: Engine, turns: Iterator[int]) -> float:
    """Seconds of a step, one a turn."""
    began, count = time.perf_counter(), 0
    for _ in turns:
        engine.step()
        count += 1
    return (time.perf_counter() - began) / count


def _ask(engine: Engine, names: Sequence[str]) -> Iterator[int]:
    """A turn for each step until all of them have been loaded; the engine takes them up as it does for rows."""
    store, coming, turn = engine.lora_store, list(names), 0
    asked: list[str] = []
    most = min(_ASKED_AHEAD, engine.settings.max_loras)
    while (coming or asked) and turn < engine.settings.max_model_len - _PROMPT - 4 * SETTLE_STEPS:
        while coming and len(asked) < most:
            asked.append(coming.pop(0))
            store.request(asked[-1])
        yield turn
        turn += 1
        asked = [name for name in asked if store.sha256(name) is None]


def _rows(bench: Workbench, count: int, new: int, lora_ids: Sequence[str | None]) -> Rows:
    rng = np.random.default_rng(count)
    prompts = [rng.integers(3, bench.config.vocab_size, _PROMPT).astype(np.int32) for _ in range(count)]
    return Rows(prompts, [new] * count, lora_ids)


Specs = dict[tuple[str, int, str], dict[str, AdapterSpec]]


@contextmanager
def _specs(bench: Workbench, rank: int, counts: Sequence[int], *, on_disk: bool) -> Iterator[Specs]:
    """Adapters of their own for each place, count and use. Those on disk are gone at the block's end."""
    specs: Specs = {}
    with tempfile.TemporaryDirectory(prefix="punica-batch-loading-") as root:
        for place in PLACES[: 1 + on_disk]:
            for count in counts:
                for use in ("first tokens", "beside others"):
                    group = bench.specs(f"{place}-{use}-{rank}-{count}", count, rank)
                    specs[place, count, use] = group if place == "page cache" else _copied(group, Path(root), count)
        yield specs


def _copied(group: dict[str, AdapterSpec], root: Path, count: int) -> dict[str, AdapterSpec]:
    """As many of them as there is room for, the same for each use of that count."""
    folder = root / str(count)
    copies: dict[str, AdapterSpec] = {}
    for i, (name, spec) in enumerate(group.items()):
        target = folder / str(i)
        if not target.exists():
            size = sum(file.stat().st_size for file in Path(spec.path).iterdir())
            if size > shutil.disk_usage(root).free * _DISK_SHARE:
                break
            shutil.copytree(spec.path, target)
        copies[name] = replace(spec, path=str(target))
    return copies


def _drop_pages(specs: Iterable[AdapterSpec]) -> None:
    for spec in specs:
        for file in Path(spec.path).iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def draw(recorder: Recorder) -> None:
    """Time to first token, and the copy rate beside the link's."""
    from punica_batch.bench.figure import curve, figure, finish, limit_curve, log_axes

    ranks = list(dict.fromkeys(line["parameters"]["rank_of_adapters"] for line in recorder.lines))
    with figure(recorder, "Adapters never seen before", 2) as (left, right):
        for axes, what in ((left, "time to first token"), (right, "copied to the device")):
            for rank in ranks:
                for place in (*PLACES, KNOWN):
                    lines = recorder.select(what, rank_of_adapters=rank, **{"from": place})
                    curve(axes, lines, "adapters", f"rank {rank}, {place}")
            limit_curve(axes, recorder.select(what, **{"from": "page cache"}), "adapters")
            if recorder.select(what):
                log_axes(axes, y=axes is left)
        finish(left, "a row of each at once", "adapters", "s to a row's first token")
        finish(right, "the link", "adapters", "GB/s to the device")
