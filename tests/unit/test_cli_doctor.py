"""``doctor``: each check's findings, and when the machine counts as fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from punica_batch import cli
from punica_batch.commands import doctor
from punica_batch.errors import JobError
from punica_batch.workers.devices import Gpu

CPU_TORCH = {"version": "2.9.0+cpu", "cuda": None, "available": False, "devices": []}
CUDA_TORCH = {"version": "2.9.0", "cuda": "12.6", "available": True, "devices": ["NVIDIA H200"]}
GPUS = [Gpu("GPU-1", 140 << 30), Gpu("GPU-2", 140 << 30)]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(tmp_path / "cache"))
    found(monkeypatch, [], CPU_TORCH)


def found(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu] | Exception, torch: dict[str, Any] | str) -> None:
    def list_gpus() -> list[Gpu]:
        if isinstance(gpus, Exception):
            raise gpus
        return gpus

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(torch, str):
            return subprocess.CompletedProcess(command, 1, "", f"Traceback\n{torch}\n")
        return subprocess.CompletedProcess(command, 0, json.dumps(torch), "")

    monkeypatch.setattr("punica_batch.workers.devices.list_gpus", list_gpus)
    monkeypatch.setattr(subprocess, "run", run)


def report(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, dict[str, Any]]:
    assert cli.execute(["doctor", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["fit"] == (code == 0)
    return {check["name"]: check for check in printed["checks"]}


def test_a_machine_without_gpu_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    checks = report(capsys)
    assert checks["driver"]["level"] == "absent"
    assert checks["torch"] == {"name": "torch", "level": "ok", "found": "2.9.0+cpu, CPU build", "mend": None}
    assert checks["flashinfer"]["mend"] is None, "nothing to mend where no GPU would use it"


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found(monkeypatch, GPUS, CUDA_TORCH)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    checks = report(capsys)
    assert checks["driver"]["found"] == "2 GPUs, 140.0 GiB or more each"
    assert checks["torch"]["found"] == "2.9.0, CUDA 12.6, NVIDIA H200"
    assert checks["flashinfer"]["level"] in ("ok", "warning")
    assert checks["nvcc"]["level"] == "warning"
    assert "CUDA_HOME" in checks["nvcc"]["mend"]


def test_a_driver_that_does_not_answer_is_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, JobError("its driver does not answer (Unknown Error)"), CPU_TORCH)
    checks = report(capsys, code=1)
    assert checks["driver"]["level"] == "missing"
    assert "nvidia-smi" in checks["driver"]["mend"]


def test_torch_that_does_not_import_is_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, [], "ImportError: libtorch_cpu.so: cannot open shared object file")
    checks = report(capsys, code=1)
    assert checks["torch"]["found"].endswith("libtorch_cpu.so: cannot open shared object file")
    assert "pip install" in checks["torch"]["mend"]


def test_a_cpu_torch_beside_gpus_is_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, GPUS, CPU_TORCH)
    assert report(capsys, code=1)["torch"]["found"] == "2.9.0+cpu, CPU build: it cannot use the GPU"


def test_little_disk_and_memory_are_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10 << 30, 10 << 30, 5 << 20))
    monkeypatch.setattr("punica_batch.workers.devices.available_memory", lambda: 100 << 20)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(blocked / "cache"))
    checks = report(capsys)
    assert checks["disk here"]["level"] == "warning"
    assert "5 MiB free" in checks["disk here"]["found"]
    assert checks["memory"]["level"] == "warning"
    assert checks["cache"]["level"] == "warning"
    assert "PUNICA_BATCH_CACHE" in checks["cache"]["mend"]


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "found", "mend", "it", "with"]
    assert [line.split()[0] for line in lines[1:]] == [
        "python", "driver", "torch", "flashinfer", "nvcc", "c", "memory", "disk", "cache",
    ]  # fmt: skip


def test_the_probe_speaks_the_truth_about_torch() -> None:
    probe = subprocess.Popen([sys.executable, "-c", doctor._TORCH_PROBE], stdout=subprocess.PIPE, text=True)
    facts = json.loads(probe.communicate(timeout=120)[0])
    assert facts["version"].startswith(version("torch"))
    assert set(facts) == set(CUDA_TORCH)
