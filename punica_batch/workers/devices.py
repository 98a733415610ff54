"""Which devices a job runs on, found without torch: NVML for NVIDIA GPUs, else CPU workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from punica_batch.config import JobConfig
from punica_batch.engine.kernel_cache import kernel_environment
from punica_batch.errors import JobError, UsageError
from punica_batch.workers.affinity import Cores, allowed_cores, physical_cores, share_cores

_NVIDIA_PCI_VENDOR = "0x10de"
# How often a thread of a CPU worker looks for the others at a barrier before it sleeps. OpenMP's own is far more: time
# that another process on the same cores could have, and with it the thread that is waited for. Beside one busy process
# on two cores 986 tokens/s of the sample in place of 832, and as many as before (1,646, 1,618) on quiet ones.
_CPU_SPINS = "5000"
# What a GPU's worker computes on the CPU (packing adapters) gains nothing from more.
_MAX_GPU_WORKER_THREADS = 8
_WORD_BITS, _MASK_WORDS = 64, 16  # of NVML's CPU masks


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's device. ``memory_bytes`` is what a worker may plan with: a GPU's whole memory, or its share of the
    RAM that is free now. ``name`` is the GPU's UUID or a CPU worker's zero-padded number. ``cores``: the logical CPUs
    that the worker is bound to (empty: to none)."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    num_threads: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    cores: Cores = frozenset()


@dataclass(frozen=True, slots=True)
class Gpu:
    """``capability``: CUDA's compute capability (None: unknown); ``near``: the logical CPUs of its NUMA node (empty:
    unknown)."""

    uuid: str
    memory_bytes: int
    free_bytes: int = 0
    capability: tuple[int, int] | None = None
    near: Cores = frozenset()


def find_devices(config: JobConfig, note: Callable[[str], None]) -> list[Device]:
    """The devices that ``--device``, ``--gpus`` and ``--workers`` ask for.

    Raises ``UsageError`` when they contradict each other or ask for more GPUs than there are, ``JobError`` when there
    is an NVIDIA device whose driver does not answer: that is never a quiet CPU run.
    """
    check_device_options(config)
    if config.device == "cpu":
        return cpu_devices(config.workers or 1)
    gpus = visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        if asked_gpus(config):
            raise UsageError(
                f"no NVIDIA device was found (`punica-batch doctor` says why): leave {asked_gpus(config)} out, "
                "or run with --device cpu"
            )
        note("no NVIDIA device found: running one CPU worker")
        return cpu_devices(1)
    return gpu_devices(choose_gpus(gpus, config.gpus))


def check_device_options(config: JobConfig) -> None:
    """Raises ``UsageError`` when they contradict each other, or say nothing that any machine could have."""
    if config.gpus is not None and (config.device == "cpu" or config.workers is not None):
        raise UsageError("--gpus cannot be joined with --device cpu or --workers: use one or the other")
    if config.workers is not None and config.device != "cpu":
        raise UsageError("--workers counts CPU workers: add --device cpu (GPUs are chosen by --gpus)")
    if config.gpus is not None:
        _gpu_numbers(config.gpus)


def asked_gpus(config: JobConfig) -> str:
    """The options that ask for a GPU, in words; empty when none does."""
    asked = ["--device cuda"] * (config.device == "cuda") + ["--gpus"] * (config.gpus is not None)
    return " and ".join(asked)


def gpu_devices(gpus: Sequence[Gpu]) -> list[Device]:
    """A worker a GPU, which sees that GPU alone and runs on its share of the cores near it."""
    allowed = allowed_cores()
    shares = share_cores([gpu.near for gpu in gpus], allowed, physical_cores(allowed))
    return [_gpu_device(gpu, cores) for gpu, cores in zip(gpus, shares, strict=True)]


def _gpu_device(gpu: Gpu, cores: Cores) -> Device:
    env = {"CUDA_VISIBLE_DEVICES": gpu.uuid, **kernel_environment(gpu.capability)}
    if cores and not os.environ.get("OMP_NUM_THREADS"):
        env["OMP_NUM_THREADS"] = str(min(len(cores), _MAX_GPU_WORKER_THREADS))
    return Device(gpu.uuid, "cuda", gpu.memory_bytes, env=env, cores=cores)


def choose_gpus(gpus: Sequence[Gpu], wanted: str | None) -> list[Gpu]:
    """``wanted``: None for all, a count ("8"), or indices ("0,2,3"; "3," for one)."""
    if wanted is None:
        return list(gpus)
    indices = _gpu_numbers(wanted)
    if "," not in wanted:
        count = indices[0]
        if not 1 <= count <= len(gpus):
            raise UsageError(f"--gpus {wanted}: {len(gpus)} found on this machine")
        return list(gpus[:count])
    if max(indices) >= len(gpus) or len(set(indices)) < len(indices):
        raise UsageError(f"--gpus {wanted}: {len(gpus)} found, numbered from 0; each may be named once")
    return [gpus[i] for i in indices]


def _gpu_numbers(wanted: str) -> list[int]:
    """The numbers in ``--gpus``: one count, or indices where there is a comma."""
    parts = [part.strip() for part in wanted.split(",")]
    if not all(part.isdecimal() for part in parts if part) or not any(parts):
        raise UsageError(f"--gpus takes a count (8) or indices (0,2,3), not {wanted!r}")
    return [int(part) for part in parts if part]


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES (``visible``; None: not set) gives to this process, in its order, as CUDA reads
    it: indices or beginnings of UUIDs, up to the first one that names no device.

    Raises ``UsageError`` where it names a part of a GPU, or one twice (CUDA then shows none): that is never a quiet CPU
    run.
    """
    if visible is None:
        return list(gpus)
    if gpus and visible.strip().startswith("MIG-"):
        raise UsageError(
            "CUDA_VISIBLE_DEVICES names a MIG slice, and workers take whole GPUs: name some, or run with --device cpu"
        )
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal():
            found = list(gpus[int(name) : int(name) + 1])
        else:
            found = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            raise UsageError(f"CUDA_VISIBLE_DEVICES names a GPU twice ({name}); CUDA then shows none: name each once")
        chosen += found
    return chosen


def list_gpus() -> list[Gpu]:
    """All NVIDIA GPUs in NVML's order; empty when there is neither device nor driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if _has_nvidia_device():
            raise JobError(
                f"an NVIDIA device is there but its driver does not answer ({error}); "
                "mend the driver, or run with --device cpu"
            ) from error
        return []
    try:
        return [_gpu(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise JobError(f"the NVIDIA driver does not answer ({error}); mend it, or run with --device cpu") from error
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """As "580.95.05 (CUDA 13.0)": the driver's version and the newest CUDA that it serves. Raises ``JobError``."""
    import pynvml

    try:
        pynvml.nvmlInit()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise JobError(f"the NVIDIA driver does not answer ({error}); mend it, or run with --device cpu") from error
    return f"{driver} (CUDA {cuda // 1000}.{cuda % 1000 // 10})"


def _gpu(handle: Any) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    return Gpu(uuid, int(memory.total), int(memory.free), (int(major), int(minor)), _cores_near(handle))


def _cores_near(handle: Any) -> Cores:
    """Of the NUMA node that the GPU hangs on: all of the machine's where it has one alone, none where NVML does not
    know (it does on Linux only, and not in every virtual machine)."""
    import pynvml

    words = max(_MASK_WORDS, -(-(os.cpu_count() or 1) // _WORD_BITS))
    try:
        mask = list(pynvml.nvmlDeviceGetCpuAffinity(handle, words))
    except pynvml.NVMLError:
        return frozenset()
    return cores_of_mask(mask)


def cores_of_mask(mask: Sequence[int]) -> Cores:
    """The set bits of 64-bit words, the lowest first."""
    return frozenset(
        word * _WORD_BITS + bit for word, bits in enumerate(mask) for bit in range(_WORD_BITS) if bits >> bit & 1
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _has_nvidia_device() -> bool:
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if any(_read(path) == _NVIDIA_PCI_VENDOR for path in vendors):
        return True
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_devices(count: int) -> list[Device]:
    """``count`` CPU workers sharing this process's cores and the free RAM evenly."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // count)
    width = len(str(count - 1))
    share = available_memory() // count
    env = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
        env["GOMP_SPINCOUNT"] = _CPU_SPINS
    return [Device(f"{i:0{width}}", "cpu", share, threads, env) for i in range(count)]


def available_memory() -> int:
    """Bytes of RAM that are free for new work now: the system's figure, or the control group's where that is less."""
    free = _meminfo().get("MemAvailable", 4 << 30)
    limit, used = _read(Path("/sys/fs/cgroup/memory.max")), _read(Path("/sys/fs/cgroup/memory.current"))
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in _read(Path("/proc/meminfo")).splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in lines if len(parts) >= 2}
