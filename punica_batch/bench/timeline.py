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
from punica_batch.types import Request, SamplingParams

# kind -> parts of its kernels' names, lower case; the first that fits counts
KINDS: dict[str, tuple[str, ...]] = {
    "add-on": ("shrink", "expand", "sgmv", "lora"),
    "attention": (
        "decodewith", "prefillwith", "batchdecode", "batchprefill", "persistentvariablelength", "variablelengthmerge",
        "mergestates", "flash_fwd", "fmha", "append", "write_kv",
    ),
    "products": ("gemm", "nvjet", "cutlass", "splitk", "gemv", "cublas"),
    "sampling": ("sampl", "argmax", "philox", "softmax", "topk", "sort", "gumbel", "reduce_kernel"),
    "norms, rotation, activation": ("norm", "rotary", "rope", "act_and_mul", "silu"),
    "copies": ("memcpy", "memset"),
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
    """Seconds a step. ``kinds``: the device's time by kind (kernels that run side by side count each); ``busy``: time
    in which anything ran; ``wall``: of the same steps before, unprofiled. ``kernels``: how many a step."""

    kinds: dict[str, float]
    busy: float
    wall: float
    kernels: float

    @property
    def host_share(self) -> float:
        """Of the wall time, that in which the device had nothing to do."""
        return max(0.0, 1 - self.busy / self.wall)


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


def profile_steps(step: Callable[[], object], count: int, device: torch.device) -> Timeline:
    """``count`` calls of ``step`` timed, then as many profiled. On a CPU nothing is profiled: all of it is busy.

    Timed without waiting for the device at either end: an engine that plans ahead is kept in step by what it collects.
    """
    for _ in range(SETTLE_STEPS):
        step()
    began = time.perf_counter()
    for _ in range(count):
        step()
    wall = (time.perf_counter() - began) / count
    synchronize(device)
    if device.type != "cuda":
        return Timeline({}, wall, wall, 0.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize(device)
    events = [
        DeviceEvent(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or []
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    kinds: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + (event.end - event.start) / count
    return Timeline(kinds, busy_seconds(events) / count, wall, len(events) / count)


def decode_timeline(engine: Engine, rows: Rows, count: int = 16) -> Timeline:
    """Of steps in which each of ``rows`` decodes one token. They need ``3 * count`` new tokens or more."""
    start(engine, rows)
    timeline = profile_steps(engine.step, count, engine.runner.kv_cache.device)
    drop(engine, len(rows.new))
    return timeline


def mixed_timeline(engine: Engine, rows: Rows, count: int = 16) -> Timeline:
    """As ``decode_timeline``, but a new row arrives before each step: the last one's prompt and adapter. It ends with
    its first token, so that its place is free for the next."""
    decoding = rows.first(len(rows.new) - 1)
    start(engine, decoding)
    arrived = len(decoding.new)

    def step() -> None:
        nonlocal arrived
        engine.add(Request(arrived, rows.prompts[-1], rows.lora_ids[-1], SamplingParams(max_tokens=1, ignore_eos=True)))
        arrived += 1
        engine.step()

    timeline = profile_steps(step, count, engine.runner.kv_cache.device)
    drop(engine, arrived)
    return timeline
