"""``doctor``: each check's findings, and when the machine counts as fit."""

from __future__ import annotations

import json
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from punica_batch import cli
from punica_batch.commands import machine
from punica_batch.engine.kernel_cache import KernelBuild
from punica_batch.errors import JobError
from punica_batch.workers.devices import Device, Gpu

CPU_TORCH = {"version": "2.9.0+cpu", "cuda": None, "available": False, "devices": [], "reason": None}
CUDA_TORCH = {
    "version": "2.9.0", "cuda": "12.6", "available": True, "devices": ["NVIDIA H200", "NVIDIA H200"], "reason": None,
    "triton": {"version": "3.5.0", "error": None}, "flashinfer": {"version": "0.6.14", "error": None},
}  # fmt: skip
H200 = Gpu("GPU-1234567890ab", 140 << 30, 139 << 30, (9, 0))
GPUS = [H200, replace(H200, uuid="GPU-ffff5678")]
MODEL = str(Path(__file__).parents[2] / "sample_data" / "model")
ADAPTERS = str(Path(__file__).parents[2] / "sample_data" / "adapters.toml")


@pytest.fixture(autouse=True)
def cpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "PUNICA_BATCH_MODEL", "PUNICA_BATCH_ADAPTERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(tmp_path / "cache"))
    found(monkeypatch, [], CPU_TORCH)


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


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The programs that are on PATH."""
    names = {"nvcc", "ninja", "cc"}
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/bin/{name}" if name in names else None)
    versions = {"flashinfer-python": "0.6.14"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    return names


def report(capsys: pytest.CaptureFixture[str], code: int = 0, *options: str) -> dict[str, dict[str, Any]]:
    assert cli.execute(["doctor", "--json", *options]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["fit"] == (code == 0)
    return {check["name"]: check for check in printed["checks"]}


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


class Builds:
    """Stands for the process that builds kernels."""

    def __init__(self, *stages: KernelBuild, error: Exception | None = None) -> None:
        self.stages, self.error = stages, error
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Iterator[KernelBuild]:
        self.calls.append(arguments)
        yield from self.stages
        if self.error is not None:
            raise self.error


@pytest.fixture
def two_kinds(monkeypatch: pytest.MonkeyPatch, tools: set[str]) -> None:
    """Three GPUs of two kinds."""
    found(monkeypatch, [H200, replace(H200, uuid="GPU-2"), replace(H200, uuid="GPU-3", capability=(8, 0))], CUDA_TORCH)
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)


@pytest.mark.usefixtures("two_kinds")
def test_kernels_are_built_for_each_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builds = Builds(KernelBuild("flashinfer norm", 39.04, 1), KernelBuild("engine", 2.0, 3))
    monkeypatch.setattr("punica_batch.workers.prebuild.build_kernels", builds)
    line = ["doctor", "--json", "--model", MODEL, "--adapters", ADAPTERS, "--max-num-seqs", "32"]
    assert cli.execute([*line, "--dtype", "float16"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == 2 * ["flashinfer norm: 39.0 s, 1 new", "engine: 2.0 s, 3 new"]
    kernels = [check for check in json.loads(printed.out)["checks"] if check["name"] == "kernels"]
    assert [check["level"] for check in kernels] == ["ok", "ok"]
    assert kernels[0]["found"].startswith("4 compiled now, the rest was there (float16, adapters of rank 2, 4, ")
    settings, devices, ranks, targets = zip(*builds.calls, strict=True)
    assert [device.name for device in devices] == [H200.uuid, "GPU-3"]
    assert isinstance(devices[0], Device)
    assert (settings[0].dtype, settings[0].device, settings[0].max_num_seqs) == ("float16", "cuda", 32)
    assert settings[0].max_lora_rank == max(ranks[0]) == 32
    assert {"q_proj", "down_proj"} <= set(targets[0])


@pytest.mark.usefixtures("two_kinds")
def test_a_kernel_that_cannot_be_built_is_a_warning_and_a_dead_engine_is_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["doctor", "--json", "--model", MODEL, "--gpus", "1", "--dtype", "float16"]
    bad, there = KernelBuild("flashinfer norm", 1.0, 0, "no such type"), KernelBuild("engine", 1.0, 0)
    for error, code in ((None, 0), (JobError("building the kernels failed (killed by SIGSEGV)"), 1)):
        monkeypatch.setattr("punica_batch.workers.prebuild.build_kernels", Builds(bad, there, error=error))
        assert cli.execute(line) == code
        checks = json.loads(capsys.readouterr().out)["checks"]
        told = [(check["level"], check["found"]) for check in checks if check["name"] == "kernels"]
        assert told[0] == ("warning", "flashinfer norm: no such type")
        last = ("missing", str(error)) if error else ("ok", "all were there (float16, no adapters)")
        assert told[1:] == [last]


def test_nothing_is_built_where_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: set[str]
) -> None:
    found(monkeypatch, GPUS, CPU_TORCH)
    builds = Builds()
    monkeypatch.setattr("punica_batch.workers.prebuild.build_kernels", builds)
    assert cli.execute(["doctor", "--json", "--model", MODEL]) == 1
    assert not builds.calls


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


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--device", "cuda"], "--device cuda"),
        (["--gpus", "2"], "--gpus"),
        (["--device", "cuda", "--gpus", "0,"], "--device cuda and --gpus"),
    ],
)
def test_a_gpu_that_is_asked_for_and_not_there_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], asked: str
) -> None:
    """With all other checks beside it, whether there is none or none is visible."""
    driver = report(capsys, 1, *options)["driver"]
    assert (driver["level"], driver["found"]) == ("missing", f"no NVIDIA device, but {asked} asks for one")
    assert driver["mend"].endswith(f"or leave {asked} out")
    assert cli.execute(["doctor", *options]) == 1
    out, err = capsys.readouterr()
    assert "missing" in out
    assert err == ""
    found(monkeypatch, GPUS, CUDA_TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver = report(capsys, 1, *options)["driver"]
    assert (driver["level"], driver["mend"]) == ("missing", "unset CUDA_VISIBLE_DEVICES")
    assert driver["found"].endswith(f"hides 2 GPUs: {asked} finds none")


def test_doctor_looks_at_the_gpus_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tools: set[str]
) -> None:
    found(monkeypatch, [H200, replace(H200, uuid="GPU-old", capability=(7, 5))], CUDA_TORCH)
    assert report(capsys, 1)["gpu GPU-old"]["level"] == "missing"
    assert "gpu GPU-old" not in report(capsys, 0, "--gpus", "1")
    assert (
        report(capsys, 1, "--gpus", "3")["driver"]["found"] == "580.95 (CUDA 13.0); --gpus 3: 2 found on this machine"
    )
    assert cli.execute(["doctor", "--gpus", "x"]) == cli.execute(["doctor", "--gpus", "1", "--device", "cpu"]) == 2
    found(monkeypatch, JobError("no answer"), CPU_TORCH)
    assert report(capsys, 1)["driver"]["level"] == "missing"
    assert report(capsys, 0, "--device", "cpu")["driver"]["level"] == "absent", "a run on the CPU does not ask it"


def test_without_a_model_the_kernels_are_absent_and_a_model_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = report(capsys)["kernels"]
    assert (kernels["level"], kernels["mend"]) == ("absent", "punica-batch doctor --model FOLDER")
