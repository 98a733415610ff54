"""What the device does in one step of a running engine: time by kind of kernel, and how long it has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from punica_batch.bench.device import synchronize
from punica_batch.bench.serving import SETTLE_STEPS, Rows, drop, start
from punica_batch.engine.engine import Engine
from punica_batch.errors import JobError
from punica_batch.types import Request, SamplingParams

# kind -> parts of its kernels' names, lower case; the first that fits counts
KINDS: dict[str, tuple[str, ...]] = {
    "add-on": ("shrink", "expand", "sgmv", "lora"),
    "attention": (
        "decodewith", "prefillwith", "batchdecode", "batchprefill", "persistentvariablelength", "variablelengthmerge",
        "mergestates", "flash_fwd", "fmha", "append",
    ),
    "products": ("gemm", "nvjet", "cutlass", "splitk", "gemv", "cublas", "few_rows"),
    "sampling": ("sampl", "argmax", "draw_kernel", "philox", "softmax", "topk", "sort", "gumbel", "reduce_kernel"),
    "norms, rotation, activation": ("norm", "rotary", "rope", "act_and_mul", "silu"),
    "copies": ("memcpy", "memset", "repack"),
}  # fmt: skip
OTHER = "other"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """One kernel or copy. Seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds a step, of steps in which at least ``rows`` rows ran and ``tokens`` tokens were computed.

    ``kinds``: the device's time by kind, each kernel's own: together more than ``busy`` where kernels run side by side
    (a dependent launch begins before the one it waits for ends). ``busy``: time in which anything ran. ``wall``: of as
    many steps of the same batch just before, unprofiled. ``kernels``: how many a step.
    """

    kinds: dict[str, float]
    busy: float
    wall: float
    kernels: float
    rows: int
    tokens: float

    @property
    def gaps(self) -> float:
        """In which the device had nothing to do; 0 where profiling made the kernels longer than the whole step was."""
        return max(0.0, self.wall - self.busy)

    @property
    def host_share(self) -> float:
        """The gaps' share of the wall time."""
        return self.gaps / self.wall


def kind_of(name: str) -> str:
    """A kernel's kind by its name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), OTHER)


def busy_seconds(events: Iterable[DeviceEvent]) -> float:
    """Time in which at least one of them ran."""
    total, reached = 0.0, -np.inf
    for event in sorted(events, key=lambda e: e.start):
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return float(total)


def profile_steps(engine: Engine, step: Callable[[], object], count: int, rows: int, slack: float = 0.0) -> Timeline:
    """``count`` calls of ``step`` timed, then as many profiled, while ``rows`` rows run all the time. On a CPU nothing
    is profiled: all of it is busy.

    Timed without waiting for the device at either end: an engine that plans ahead is kept in step by what it collects.
    Raises ``JobError`` where fewer rows ran, or where the two measurements differ by over ``slack`` tokens a step.
    """
    device = engine.runner.kv_cache.device
    for _ in range(SETTLE_STEPS):
        step()
    began = time.perf_counter()
    timed = _tokens_a_step(engine, step, count, rows)
    wall = (time.perf_counter() - began) / count
    synchronize(device)
    if device.type != "cuda":
        return Timeline({}, wall, wall, 0.0, rows, timed)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        profiled = _tokens_a_step(engine, step, count, rows)
        torch.cuda.synchronize(device)
    require_alike(timed, profiled, slack)
    events = [
        DeviceEvent(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or []
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    kinds: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + (event.end - event.start) / count
    return Timeline(kinds, busy_seconds(events) / count, wall, len(events) / count, rows, timed)


def _tokens_a_step(engine: Engine, step: Callable[[], object], count: int, rows: int) -> float:
    """Runs ``count`` steps; the tokens of prompts and answers that each computed."""
    before = engine.stats()
    for _ in range(count):
        step()
    after = engine.stats()
    running = min(before.running, after.running)
    if running < rows:
        raise JobError(f"{running} rows ran where {rows} were to: the steps are not alike")
    computed = after.prompt_tokens + after.generated_tokens - before.prompt_tokens - before.generated_tokens
    return computed / count


def require_alike(timed: float, profiled: float, slack: float) -> None:
    """Tokens a step of two measurements that are compared. Raises ``JobError``."""
    if abs(timed - profiled) > slack:
        raise JobError(f"a timed step computed {timed:g} tokens and a profiled one {profiled:g}: they are not alike")


def decode_timeline(engine: Engine, rows: Rows, count: int = 16) -> Timeline:
    """Of steps in which each of ``rows`` decodes one token. Their answers must outlast ``start`` and three times
    ``count`` steps; raises ``JobError`` as ``profile_steps`` does."""
    try:
        start(engine, rows)
        return profile_steps(engine, engine.step, count, len(rows.new))
    finally:
        drop(engine, len(rows.new))


def mixed_timeline(engine: Engine, rows: Rows, count: int = 16) -> Timeline:
    """As ``decode_timeline``, but a new row arrives before each step: the last one's prompt and adapter. It ends with
    its first token, so that its place is free for the next."""
    decoding = rows.first(len(rows.new) - 1)
    arrived = len(decoding.new)

    def step() -> None:
        nonlocal arrived
        engine.add(Request(arrived, rows.prompts[-1], rows.lora_ids[-1], SamplingParams(max_tokens=1, ignore_eos=True)))
        arrived += 1
        engine.step()

    try:
        start(engine, decoding)
        # one prompt more or less may fall into the measured steps
        return profile_steps(engine, step, count, len(decoding.new), (1 + len(rows.prompts[-1])) / count)
    finally:
        drop(engine, arrived)
