"""``doctor``: each check's findings, and when the machine counts as fit."""

from __future__ import annotations

import json
import subprocess
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import CPU_TORCH, CUDA_TORCH, GPUS, be_a_cpu_machine, found, have_tools, report

from punica_batch import cli
from punica_batch.commands import machine
from punica_batch.errors import JobError
from punica_batch.workers.devices import Gpu


@pytest.fixture(autouse=True)
def cpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_a_cpu_machine(tmp_path, monkeypatch)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return have_tools(monkeypatch)


def test_a_machine_without_gpu_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    checks = report(capsys)
    assert checks["driver"]["level"] == "absent"
    assert checks["torch"] == {"name": "torch", "level": "ok", "found": "2.9.0+cpu, CPU build", "mend": None}
    assert checks["flashinfer"]["mend"] is None, "nothing to mend where no GPU would use it"


def test_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: set[str]
) -> None:
    found(monkeypatch, GPUS, CUDA_TORCH)
    checks = report(capsys)
    assert checks["driver"]["found"] == "580.95 (CUDA 13.0), 2 GPUs"
    assert checks["gpu GPU-12345678"]["found"] == "compute capability 9.0, 139.0 GiB of 140.0 GiB free"
    assert checks["torch"]["found"] == "2.9.0, CUDA 12.6, NVIDIA H200"
    assert checks["triton"]["found"] == "3.5.0, compiles"
    assert checks["flashinfer"]["found"] == "0.6.14"
    assert checks["nvcc"]["found"] == "12.6 (/bin/nvcc)"
    assert checks["ninja"]["found"] == "/bin/ninja"
    assert {check["level"] for name, check in checks.items() if name != "kernels"} == {"ok"}
    assert checks["kernels"]["level"] == "absent"
    assert checks["kernels"]["mend"] == "punica-batch doctor --model FOLDER"


@pytest.mark.parametrize(
    ("name", "change", "level", "words"),
    [
        ("triton", {"triton": {"version": "3.5.0", "error": "fatal error: Python.h"}}, "missing", "Python.h"),
        ("triton", {"triton": {"version": None, "error": "ImportError: x"}}, "missing", "does not import"),
        ("flashinfer", {"flashinfer": {"version": None, "error": "OSError: y"}}, "warning", "OSError: y"),
        ("nvcc", {"cuda": "13.0"}, "warning", "12.6 (/bin/nvcc), torch is built for CUDA 13.0"),
        ("torch", {"available": False, "reason": "driver too old"}, "missing", "(driver too old)"),
    ],
)
def test_what_torch_finds_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: set[str],
    name: str, change: dict[str, Any], level: str, words: str,
) -> None:  # fmt: skip
    found(monkeypatch, GPUS, CUDA_TORCH | change)
    check = report(capsys, code=int(level == "missing"))[name]
    assert check["level"] == level
    assert words in check["found"]
    assert check["mend"]


@pytest.mark.parametrize(("gone", "check"), [("nvcc", "nvcc"), ("ninja", "ninja")])
def test_compilers_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: set[str], gone: str, check: str
) -> None:
    found(monkeypatch, GPUS, CUDA_TORCH)
    tools.remove(gone)
    told = report(capsys)[check]
    assert told["level"] == "warning"
    assert told["mend"]


@pytest.mark.parametrize(
    ("gpu", "level", "words"),
    [
        (Gpu("GPU-1", 16 << 30, 16 << 30, (7, 5)), "missing", "7.5"),
        (Gpu("GPU-1", 80 << 30, 20 << 30, (8, 0)), "warning", "20.0 GiB of 80.0 GiB free"),
    ],
)
def test_gpus_that_are_too_old_or_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: set[str],
    gpu: Gpu, level: str, words: str,
) -> None:  # fmt: skip
    found(monkeypatch, [gpu], CUDA_TORCH)
    check = report(capsys, code=int(level == "missing"))["gpu GPU-1"]
    assert check["level"] == level
    assert words in check["found"]


def test_gpus_that_are_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: set[str]
) -> None:
    found(monkeypatch, GPUS, CPU_TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = report(capsys)["driver"]
    assert check["level"] == "warning"
    assert check["mend"] == "unset CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2c1f4ad0")
    check = report(capsys, code=1)["driver"]
    assert check["level"] == "missing"
    assert "names a MIG slice" in check["found"]


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
    checks = report(capsys, code=1)
    assert checks["torch"]["found"] == "2.9.0+cpu, CPU build: it cannot use the GPU"
    assert checks["triton"]["level"] == "absent"


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
        "python", "driver", "torch", "flashinfer", "nvcc", "c", "memory", "disk", "cache", "kernels",
    ]  # fmt: skip


def test_the_probe_speaks_the_truth_about_torch() -> None:
    with subprocess.Popen(machine._PROBE, stdout=subprocess.PIPE, text=True) as probe:
        facts = json.loads(probe.communicate(timeout=120)[0].splitlines()[-1])
    assert facts["version"].startswith(version("torch"))
    assert set(CPU_TORCH) <= set(facts) <= set(CUDA_TORCH)
    assert facts["available"] == ("triton" in facts)
