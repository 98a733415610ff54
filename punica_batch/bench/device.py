"""The device that is measured: is it there, how a step is timed on it, and how fast it can be at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch

from punica_batch.bench.clocks import Clocks
from punica_batch.bench.record import Recorder, Spread
from punica_batch.errors import UsageError
from punica_batch.types import JsonDict

_WARMUPS = 3
_CPU_REPEATS = 3
_SUSTAINED_SECONDS = 5.0  # of products: a GPU lowers its clock to stay within its power after some tenths


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured, of one device and dtype: ``copy`` bytes a second, read and written both counted; ``product`` FLOP/s of
    a large matrix product, sustained, and what the GPU's clock and power were then. The roof of a roofline plot (Punica
    paper, figure 7)."""

    copy: float
    product: float
    clocks: JsonDict = field(default_factory=dict)

    def seconds(self, moved: float = 0.0, flop: float = 0.0) -> float:
        """The least time for moving ``moved`` bytes and computing ``flop`` operations, one beside the other."""
        return max(moved / self.copy, flop / self.product)

    def write(self, recorder: Recorder) -> None:
        """As lines of their own, so that the limits of the others can be worked out again."""
        recorder.write("copy bandwidth", "TB/s", self.copy / 1e12)
        recorder.write("matrix product", "TFLOP/s", self.product / 1e12, **self.clocks)


def open_device(name: str) -> torch.device:
    """Raises ``UsageError`` when it is not there."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("bench needs an NVIDIA GPU, and torch finds none here (punica-batch doctor says why)")
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise UsageError(f"--device {name}: torch finds {count} here, numbered from 0")
        torch.cuda.set_device(index)
    return device


def gpu_number(name: str) -> int:
    """Of ``cuda`` or ``cuda:N``, which ``BenchOptions`` has checked; 0 for ``cpu``."""
    return torch.device(name).index or 0


def synchronize(device: torch.device) -> None:
    """Waits for what was enqueued; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_step(
    step: Callable[[], object], device: torch.device, *, repeats: int = 25, seconds: float = 1.0, graph: bool = True
) -> Spread:
    """Seconds of one ``step``. On a GPU: of the replays of its CUDA graph, between events, after a warm-up.

    ``step`` is called once or more before, for what it compiles and allocates, and must be capturable; without
    ``graph`` it is called each time, and the host's share counts. Repeats end after about ``seconds``, but not before
    five. A step should touch more memory than the L2 cache holds, by distinct buffers for each layer.
    """
    with torch.inference_mode():
        if device.type != "cuda":
            return _time_on_host(step)
        for _ in range(2):
            step()
        torch.cuda.synchronize(device)
        if not graph:
            return _time_on_device(step, repeats, seconds)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        return _time_on_device(captured.replay, repeats, seconds)


@cache
def ceilings(device: torch.device, dtype: torch.dtype, seconds: float = _SUSTAINED_SECONDS) -> Ceilings:
    """Measured once a process: moving 1 GiB, and the product of two 8192 x 8192 matrices for ``seconds``."""
    size = 8192 if device.type == "cuda" else 128
    copy = _copy_rate(device, dtype)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    with Clocks(device) as clocks:
        product = time_step(lambda: torch.mm(a, b, out=out), device, repeats=1 << 20, seconds=seconds)
    return Ceilings(copy, 2 * size**3 / product.median, clocks.medians)


def _copy_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The highest rate of three ways to move bytes: in a graph, the driver's copy has been seen at two thirds of what
    kernels reach."""
    elements = (1 << 30 if device.type == "cuda" else 1 << 19) // dtype.itemsize
    source = torch.zeros(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    ways: list[tuple[Callable[[], object], int]] = [
        (lambda: target.copy_(source), 2),
        (lambda: torch.neg(source, out=target), 2),
        (lambda: torch.add(source, target, out=target), 3),
    ]
    return max(times * source.nbytes / time_step(way, device, repeats=10).median for way, times in ways)


@cache
def host_link(device: torch.device) -> float:
    """Bytes a second from pinned host memory to the device, copied in pieces of 256 MiB."""
    is_gpu = device.type == "cuda"
    source = torch.zeros(1 << 28 if is_gpu else 1 << 20, dtype=torch.uint8, pin_memory=is_gpu)
    target = torch.empty_like(source, device=device)
    copied = time_step(lambda: target.copy_(source, non_blocking=True), device, repeats=10, graph=False)
    return source.nbytes / copied.median


def free_memory(device: torch.device) -> None:
    """Between two benchmarks: gives cached memory back."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _time_on_host(step: Callable[[], object]) -> Spread:
    step()
    times = [time.perf_counter()]
    for _ in range(_CPU_REPEATS):
        step()
        times.append(time.perf_counter())
    return Spread.of(b - a for a, b in pairwise(times))


def _time_on_device(step: Callable[[], object], repeats: int, seconds: float) -> Spread:
    began = time.perf_counter()
    for _ in range(_WARMUPS):
        step()
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / _WARMUPS
    repeats = max(5, min(repeats, int(seconds / max(took, 1e-6))))
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(repeats + 1)
    ]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return Spread.of(a.elapsed_time(b) / 1000 for a, b in pairwise(events))
