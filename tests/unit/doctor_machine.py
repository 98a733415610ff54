"""Machines that are not this one, as NVML, torch and the compilers would tell ``doctor`` of them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from punica_batch import cli
from punica_batch.workers.devices import Gpu

CPU_TORCH = {"version": "2.9.0+cpu", "cuda": None, "available": False, "devices": [], "reason": None}
CUDA_TORCH = {
    "version": "2.9.0", "cuda": "12.6", "available": True, "devices": ["NVIDIA H200", "NVIDIA H200"], "reason": None,
    "triton": {"version": "3.5.0", "error": None}, "flashinfer": {"version": "0.6.14", "error": None},
}  # fmt: skip
H200 = Gpu("GPU-1234567890ab", 140 << 30, 139 << 30, (9, 0))
GPUS = [H200, replace(H200, uuid="GPU-ffff5678")]


def found(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu] | Exception, torch: dict[str, Any] | str, nvcc: str = "12.6"
) -> None:
    """What NVML, torch and nvcc would say."""

    def list_gpus() -> list[Gpu]:
        if isinstance(gpus, Exception):
            raise gpus
        return gpus

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[-1] == "--version":
            return subprocess.CompletedProcess(command, 0, f"Cuda compilation tools, release {nvcc}, V{nvcc}.20", "")
        if isinstance(torch, str):
            return subprocess.CompletedProcess(command, 1, "", f"Traceback\n{torch}\n")
        return subprocess.CompletedProcess(command, 0, "a library says hello\n" + json.dumps(torch), "")

    monkeypatch.setattr("punica_batch.workers.devices.list_gpus", list_gpus)
    monkeypatch.setattr("punica_batch.workers.devices.driver_version", lambda: "580.95 (CUDA 13.0)")
    monkeypatch.setattr(subprocess, "run", run)


def report(capsys: pytest.CaptureFixture[str], code: int = 0, *options: str) -> dict[str, dict[str, Any]]:
    assert cli.execute(["doctor", "--json", *options]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["fit"] == (code == 0)
    return {check["name"]: check for check in printed["checks"]}


def be_a_cpu_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good machine without a GPU; ``folder`` is the current one."""
    monkeypatch.chdir(folder)
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "PUNICA_BATCH_MODEL", "PUNICA_BATCH_ADAPTERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(folder / "cache"))
    found(monkeypatch, [], CPU_TORCH)


def have_tools(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The programs that are on PATH, to be changed."""
    names = {"nvcc", "ninja", "cc"}
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/bin/{name}" if name in names else None)
    versions = {"flashinfer-python": "0.6.14"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    return names
