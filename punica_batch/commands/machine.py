"""What this machine has, what it lacks, and the command that mends it. Nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from punica_batch.errors import JobError, UsageError
from punica_batch.ui.checks import Check
from punica_batch.ui.format import plural, size

if TYPE_CHECKING:
    from punica_batch.config import JobConfig
    from punica_batch.workers.devices import Gpu

MIN_FREE_DISK = 1 << 30
MIN_FREE_MEMORY = 1 << 30
MIN_CAPABILITY = (8, 0)
MIN_FREE_GPU = 0.9  # of its memory: what a worker plans with by default
PROBE_SECONDS = 300
_PROBE = (sys.executable, "-m", "punica_batch_kernels.probe")
_PIP = f"{sys.executable} -m pip install"
_TOOLKIT = "install the CUDA toolkit of torch's CUDA version, then: export CUDA_HOME=/usr/local/cuda"

Facts = dict[str, Any]


def examine(config: JobConfig) -> list[Check]:
    """All checks in the order in which they matter; those of the GPUs that ``config`` would use. Raises ``UsageError``
    for device options that fit no machine."""
    driver, gpus = check_driver(config)
    torch, facts = check_torch(gpus)
    checks = [check_python(), driver, *map(check_gpu, gpus), torch]
    if gpus:
        checks += [check_triton(facts)]
    checks += [check_flashinfer(gpus, facts), check_nvcc(gpus, facts)]
    if gpus:
        checks += [check_ninja()]
    return [*checks, check_c_compiler(), check_memory(), check_disk("disk here", Path.cwd()), check_cache()]


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} ({sys.executable})")


def check_driver(config: JobConfig) -> tuple[Check, list[Gpu]]:
    """The NVIDIA driver, and the GPUs that a run would use. What ``config`` asks for and is not there is missing."""
    from punica_batch.workers.devices import (
        asked_gpus,
        check_device_options,
        choose_gpus,
        driver_version,
        list_gpus,
        visible_gpus,
    )

    check_device_options(config)
    if config.device == "cpu":
        return Check("driver", "absent", "not looked at: --device cpu"), []
    asked = asked_gpus(config)
    try:
        gpus = list_gpus()
        version = driver_version() if gpus else ""
    except JobError as error:
        return Check("driver", "missing", str(error), "nvidia-smi (says why; reload or reinstall the driver)"), []
    if not gpus and asked:
        mend = f"install NVIDIA's driver (nvidia-smi must list the GPU), or leave {asked} out"
        return Check("driver", "missing", f"no NVIDIA device, but {asked} asks for one", mend), []
    if not gpus:
        return Check("driver", "absent", "no NVIDIA device: jobs run on the CPU"), []
    try:
        visible = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except UsageError as error:
        mend = "export CUDA_VISIBLE_DEVICES=0 (whole GPUs, each once; nvidia-smi -i 0 -mig 0 ends slices)"
        return Check("driver", "missing", f"{version}; {error}", mend), []
    if not visible:
        found = f"{version}; CUDA_VISIBLE_DEVICES hides {plural(len(gpus), 'GPU')}: "
        found += f"{asked} finds none" if asked else "jobs run on the CPU"
        return Check("driver", "missing" if asked else "warning", found, "unset CUDA_VISIBLE_DEVICES"), []
    try:
        chosen = choose_gpus(visible, config.gpus)
    except UsageError as error:
        return Check("driver", "missing", f"{version}; {error}", "name fewer with --gpus, or leave it out"), []
    return Check("driver", "ok", f"{version}, {plural(len(visible), 'GPU')}"), chosen


def check_gpu(gpu: Gpu) -> Check:
    """Its compute capability, and how much of its memory is free."""
    name = f"gpu {gpu.uuid[:12]}"
    capability = "unknown" if gpu.capability is None else "{}.{}".format(*gpu.capability)
    memory = f"{size(gpu.free_bytes)} of {size(gpu.memory_bytes)} free"
    found = f"compute capability {capability}, {memory}"
    if gpu.capability is not None and gpu.capability < MIN_CAPABILITY:
        return Check(name, "missing", f"{found}: 8.0 (A100) or newer is needed", "--device cpu, or --gpus without it")
    if gpu.free_bytes < MIN_FREE_GPU * gpu.memory_bytes:
        return Check(name, "warning", f"{found}: something else uses it", "nvidia-smi (names the processes)")
    return Check(name, "ok", found)


def check_torch(gpus: Sequence[Gpu]) -> tuple[Check, Facts]:
    """Asks torch in a process of its own: this one stays light, and a broken build cannot take it down."""
    install = f"{_PIP} 'torch>=2.6'"
    try:
        done = subprocess.run(_PROBE, capture_output=True, text=True, timeout=PROBE_SECONDS, env=_gpu_env(gpus))
    except subprocess.TimeoutExpired:
        return Check("torch", "missing", f"does not import within {PROBE_SECONDS} s", install), {}
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return Check("torch", "missing", f"does not import: {reason}", install), {}
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    build = f"{facts['version']}, " + (f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build")
    if gpus and not facts["available"]:
        why = "it cannot use the GPU"
        if facts["cuda"]:
            why = f"its CUDA does not work with this driver ({facts['reason'] or 'no reason given'})"
        mend = f"{install} --force-reinstall (a build for this driver's CUDA)"
        return Check("torch", "missing", f"{build}: {why}", mend), facts
    return Check("torch", "ok", ", ".join([build, *dict.fromkeys(facts["devices"])])), facts


def check_triton(facts: Facts) -> Check:
    found = facts.get("triton")
    if found is None:
        return Check("triton", "absent", "not tried: torch has to work first")
    if found["version"] is None:
        return Check("triton", "missing", f"does not import: {found['error']}", f"{_PIP} triton")
    if found["error"] is not None:
        mend = "install gcc and Python's headers (python3-dev)"
        return Check("triton", "missing", f"{found['version']} cannot compile: {found['error']}", mend)
    return Check("triton", "ok", f"{found['version']}, compiles")


def check_flashinfer(gpus: Sequence[Gpu], facts: Facts) -> Check:
    mend = f"{_PIP} 'punica-batch[cuda]'"
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        if not gpus:
            return Check("flashinfer", "absent", "not installed; only GPUs use it")
        return Check("flashinfer", "warning", "not installed: jobs are much slower", mend)
    error = (facts.get("flashinfer") or {}).get("error")
    if error is not None:
        return Check("flashinfer", "warning", f"{version} does not import, jobs are much slower: {error}", mend)
    return Check("flashinfer", "ok", version)


def check_nvcc(gpus: Sequence[Gpu], facts: Facts) -> Check:
    """FlashInfer's compiler, looked for where FlashInfer does. Its major version must be that of torch's CUDA."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    nvcc = nvcc or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        if not gpus:
            return Check("nvcc", "absent", "not found; only GPU kernels are compiled")
        return Check("nvcc", "warning", "not found: FlashInfer cannot compile here", _TOOLKIT)
    if not gpus:
        return Check("nvcc", "ok", nvcc)
    version = _nvcc_version(nvcc)
    cuda = facts.get("cuda")
    if version is None:
        return Check("nvcc", "warning", f"{nvcc} does not run", _TOOLKIT)
    if cuda and version.partition(".")[0] != cuda.partition(".")[0]:
        found = f"{version} ({nvcc}), torch is built for CUDA {cuda}: kernels may not load"
        return Check("nvcc", "warning", found, _TOOLKIT)
    return Check("nvcc", "ok", f"{version} ({nvcc})")


def check_ninja() -> Check:
    ninja = shutil.which("ninja")
    if ninja is None:
        return Check("ninja", "warning", "not found on PATH: FlashInfer cannot compile here", f"{_PIP} ninja")
    return Check("ninja", "ok", ninja)


def check_c_compiler() -> Check:
    """Compiles the CPU's kernels at first use; without one they run in plain torch."""

    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is not None:
        return Check("c compiler", "ok", compiler)
    return Check("c compiler", "warning", "not found: CPU workers are slower", "install gcc or clang")


def check_memory() -> Check:
    from punica_batch.workers.devices import available_memory

    free = available_memory()
    if free < MIN_FREE_MEMORY:
        return Check("memory", "warning", f"{size(free)} free", "close other programs, or use a larger machine")
    return Check("memory", "ok", f"{size(free)} free")


def check_disk(name: str, folder: Path) -> Check:
    """Free space where ``folder`` is or will be."""

    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_DISK:
        return Check(name, "warning", f"{size(free)} free in {place}", f"du -xh {place} | sort -h | tail")
    return Check(name, "ok", f"{size(free)} free in {place}")


def check_cache() -> Check:
    """The cache folder must take files: compiled kernels and digests of adapters are kept there."""
    from punica_batch.adapters.digest import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "export PUNICA_BATCH_CACHE=FOLDER (one that you may write to)"
        return Check("cache", "warning", f"{folder}: {error.strerror}", mend)
    return check_disk("cache", folder)


def _gpu_env(gpus: Sequence[Gpu]) -> Mapping[str, str]:
    """A worker's environment, in which Triton and FlashInfer find what was compiled before."""
    from punica_batch.engine.kernel_cache import kernel_environment

    return {**os.environ, **(kernel_environment(gpus[0].capability) if gpus else {})}


def _nvcc_version(nvcc: str) -> str | None:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else None
