"""``doctor`` and GPUs that are asked for: which it looks at, and the kernels that it builds for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import CPU_TORCH, CUDA_TORCH, GPUS, H200, be_a_cpu_machine, found, have_tools, report

from punica_batch import cli
from punica_batch.engine.kernel_cache import KernelBuild
from punica_batch.errors import JobError
from punica_batch.workers.devices import Device

MODEL = str(Path(__file__).parents[2] / "sample_data" / "model")
ADAPTERS = str(Path(__file__).parents[2] / "sample_data" / "adapters.toml")


@pytest.fixture(autouse=True)
def cpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_a_cpu_machine(tmp_path, monkeypatch)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return have_tools(monkeypatch)


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
