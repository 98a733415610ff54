"""``punica-batch doctor``: what this machine has, what it lacks, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import json as jsonlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from punica_batch.commands.options import Json, Verbose

if TYPE_CHECKING:
    from punica_batch.ui.checks import Check

MIN_FREE_DISK = 1 << 30
MIN_FREE_MEMORY = 1 << 30
_TORCH_PROBE = """
import json, torch
available = torch.cuda.is_available()
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else []
print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda, available=available, devices=devices)))
"""


def doctor(json: Json = False, verbose: Verbose = False) -> int:
    """Look over the machine: driver, torch, FlashInfer, compiler, memory, disk. Exit 0 if a plain `run` would work."""
    from dataclasses import asdict

    from punica_batch.ui.checks import checks_table
    from punica_batch.ui.console import emit, emit_json, render

    checks = examine()
    is_fit = all(check.level != "missing" for check in checks)
    if json:
        emit_json({"schema_version": 1, "fit": is_fit, "checks": [asdict(check) for check in checks]})
    else:
        emit(render(checks_table(checks)))
    return 0 if is_fit else 1


def examine() -> list[Check]:
    """All checks in the order in which they matter."""
    driver, has_gpu = check_driver()
    return [
        check_python(),
        driver,
        check_torch(has_gpu),
        check_flashinfer(has_gpu),
        check_compiler(has_gpu),
        check_c_compiler(),
        check_memory(),
        check_disk("disk here", Path.cwd()),
        check_cache(),
    ]


def check_python() -> Check:
    from punica_batch.ui.checks import Check

    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} ({sys.executable})")


def check_driver() -> tuple[Check, bool]:
    """The NVIDIA driver, and whether there is a GPU that answers."""
    from punica_batch.errors import JobError
    from punica_batch.ui.checks import Check
    from punica_batch.ui.format import plural, size
    from punica_batch.workers.devices import list_gpus

    try:
        gpus = list_gpus()
    except JobError as error:
        return Check("driver", "missing", str(error), "nvidia-smi (says why; reload or reinstall the driver)"), False
    if not gpus:
        return Check("driver", "absent", "no NVIDIA device: jobs run on the CPU"), False
    return Check(
        "driver", "ok", f"{plural(len(gpus), 'GPU')}, {size(min(g.memory_bytes for g in gpus))} or more each"
    ), True


def check_torch(has_gpu: bool) -> Check:
    """Asks torch in a process of its own: this one stays light, and a broken build cannot take it down."""
    from punica_batch.ui.checks import Check

    install = f"{sys.executable} -m pip install 'torch>=2.6'"
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Check("torch", "missing", "does not import within 120 s", install)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return Check("torch", "missing", f"does not import: {reason}", install)
    facts: dict[str, Any] = jsonlib.loads(done.stdout.splitlines()[-1])
    build = f"{facts['version']}, " + (f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build")
    if has_gpu and not facts["available"]:
        why = "its CUDA does not work with this driver" if facts["cuda"] else "it cannot use the GPU"
        return Check(
            "torch", "missing", f"{build}: {why}", f"{install} --force-reinstall (a build for this driver's CUDA)"
        )
    return Check("torch", "ok", ", ".join([build, *facts["devices"]]))


def check_flashinfer(has_gpu: bool) -> Check:
    from punica_batch.ui.checks import Check

    try:
        return Check("flashinfer", "ok", importlib.metadata.version("flashinfer-python"))
    except importlib.metadata.PackageNotFoundError:
        if not has_gpu:
            return Check("flashinfer", "absent", "not installed; only GPUs use it")
        mend = f"{sys.executable} -m pip install 'punica-batch[cuda]'"
        return Check("flashinfer", "warning", "not installed: attention is slower", mend)


def check_compiler(has_gpu: bool) -> Check:
    from punica_batch.ui.checks import Check

    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is not None:
        return Check("nvcc", "ok", nvcc)
    if not has_gpu:
        return Check("nvcc", "absent", "not found; only GPU kernels are compiled")
    mend = "install the CUDA toolkit of torch's CUDA version, then: export CUDA_HOME=/usr/local/cuda"
    return Check("nvcc", "warning", "not found: kernels cannot be built here", mend)


def check_c_compiler() -> Check:
    """Compiles the CPU's kernels at first use; without one they run in plain torch."""
    from punica_batch.ui.checks import Check

    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is not None:
        return Check("c compiler", "ok", compiler)
    return Check("c compiler", "warning", "not found: CPU workers are slower", "install gcc or clang")


def check_memory() -> Check:
    from punica_batch.ui.checks import Check
    from punica_batch.ui.format import size
    from punica_batch.workers.devices import available_memory

    free = available_memory()
    if free < MIN_FREE_MEMORY:
        return Check("memory", "warning", f"{size(free)} free", "close other programs, or use a larger machine")
    return Check("memory", "ok", f"{size(free)} free")


def check_disk(name: str, folder: Path) -> Check:
    """Free space where ``folder`` is or will be."""
    from punica_batch.ui.checks import Check
    from punica_batch.ui.format import size

    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_DISK:
        return Check(name, "warning", f"{size(free)} free in {place}", f"du -xh {place} | sort -h | tail")
    return Check(name, "ok", f"{size(free)} free in {place}")


def check_cache() -> Check:
    """The cache folder must take files: digests of adapters are kept there."""
    from punica_batch.adapters.digest import cache_folder
    from punica_batch.ui.checks import Check

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "export PUNICA_BATCH_CACHE=FOLDER (one that you may write to)"
        return Check("cache", "warning", f"{folder}: {error.strerror}", mend)
    return check_disk("cache", folder)
