"""Which devices a job gets: what was asked for, or an error that says what there is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from punica_batch.config import JobConfig
from punica_batch.errors import JobError, UsageError
from punica_batch.workers import devices
from punica_batch.workers.devices import (
    Gpu,
    choose_gpus,
    cores_of_mask,
    cpu_devices,
    find_devices,
    gpu_devices,
    visible_gpus,
)

FOUR = [Gpu(f"GPU-{i}", 1 << 30) for i in range(4)]


@pytest.mark.parametrize(
    ("wanted", "uuids"),
    [(None, "0123"), ("1", "0"), ("4", "0123"), ("0,2,3", "023"), ("3,", "3"), ("2,0", "20")],
)
def test_choose_gpus(wanted: str | None, uuids: str) -> None:
    assert [g.uuid for g in choose_gpus(FOUR, wanted)] == [f"GPU-{u}" for u in uuids]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [(None, "0123"), ("", ""), ("2,0", "20"), ("GPU-3", "3"), ("1,7,2", "1"), ("-1", ""), ("GPU-", "")],
)
def test_cuda_visible_devices_is_honoured(visible: str | None, uuids: str) -> None:
    assert [g.uuid for g in visible_gpus(FOUR, visible)] == [f"GPU-{u}" for u in uuids]


def test_a_mig_slice_is_refused_and_not_run_on_the_cpu() -> None:
    with pytest.raises(UsageError, match="MIG slice"):
        visible_gpus(FOUR, "MIG-2c1f4ad0")
    assert visible_gpus([], "MIG-2c1f4ad0") == []


@pytest.mark.parametrize("visible", ["0,0", "2,1,2", "1,GPU-1"])
def test_a_gpu_named_twice_is_refused_as_cuda_does(visible: str) -> None:
    with pytest.raises(UsageError, match=rf"twice \({visible.rpartition(',')[2]}\)"):
        visible_gpus(FOUR, visible)
    assert visible_gpus([], visible) == []
    assert [g.uuid for g in visible_gpus(FOUR, "0,7,0")] == ["GPU-0"]  # what follows an unknown one is not read


@pytest.mark.parametrize("wanted", ["5", "0", "0,4", "1,1"])
def test_more_gpus_than_there_are_says_how_many(wanted: str) -> None:
    with pytest.raises(UsageError, match="4 found"):
        choose_gpus(FOUR, wanted)


@pytest.mark.parametrize("wanted", ["all", "-1", ",", "", "1.5"])
def test_gpus_that_are_no_numbers(wanted: str) -> None:
    with pytest.raises(UsageError, match="--gpus takes"):
        choose_gpus(FOUR, wanted)


@pytest.mark.parametrize("options", [{"gpus": "2", "device": "cpu"}, {"gpus": "2", "workers": 2}, {"workers": 2}])
def test_contradicting_options(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        find_devices(JobConfig(**options), lambda line: None)


@pytest.mark.parametrize("told", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_cpu_workers_do_not_spin_for_long_unless_told_to(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if told is not None:
        monkeypatch.setenv(told, "1")
    assert ("GOMP_SPINCOUNT" in cpu_devices(1)[0].env) == (told is None)


def test_cpu_workers_share_the_machine() -> None:
    found = cpu_devices(12)
    assert [d.name for d in found] == sorted(d.name for d in found)
    assert found[3].name == "03"
    assert all(d.num_threads and d.num_threads >= 1 for d in found)
    assert sum(d.memory_bytes for d in found) <= devices.available_memory() * 1.5


def no_driver() -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def test_no_device_and_no_driver_is_one_cpu_worker_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setattr(devices, "_has_nvidia_device", lambda: False)
    lines: list[str] = []
    found = find_devices(JobConfig(), lines.append)
    assert [d.kind for d in found] == ["cpu"]
    assert len(lines) == 1
    asked: dict[str, dict[str, Any]] = {
        "--gpus": {"gpus": "1"},
        "--device cuda": {"device": "cuda"},
        "--device cuda and --gpus": {"gpus": "1", "device": "cuda"},
    }
    for options, values in asked.items():
        with pytest.raises(UsageError) as refused:
            find_devices(JobConfig(**values), lines.append)
        assert str(refused.value) == (
            f"no NVIDIA device was found (`punica-batch doctor` says why): leave {options} out, "
            "or run with --device cpu"
        )


def test_a_device_whose_driver_is_silent_is_never_a_cpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setattr(devices, "_has_nvidia_device", lambda: True)
    with pytest.raises(JobError, match="driver does not answer"):
        find_devices(JobConfig(), lambda line: None)


def test_the_bits_of_nvml_masks() -> None:
    assert cores_of_mask([0b1011, 0, 1 << 63]) == {0, 1, 3, 191}


def test_each_gpu_has_its_environment_and_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OMP_NUM_THREADS", "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(devices, "allowed_cores", lambda: frozenset(range(64)))
    monkeypatch.setattr(devices, "physical_cores", lambda cpus: {})
    near = [frozenset(range(32)), frozenset(range(32, 40))]
    gpus = [Gpu(f"GPU-{i}", 80 << 30, 80 << 30, (9 - i, 0), near[i]) for i in range(2)]
    hopper, ampere = gpu_devices(gpus)
    assert (hopper.cores, ampere.cores) == tuple(near)
    assert hopper.env == {
        "CUDA_VISIBLE_DEVICES": "GPU-0", "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "OMP_NUM_THREADS": "8",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }  # fmt: skip
    assert ampere.env["FLASHINFER_CUDA_ARCH_LIST"] == "8.0"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in gpu_devices(gpus)[0].env


def nvml(monkeypatch: pytest.MonkeyPatch, affinity: Any) -> None:
    """Two GPUs, as NVML tells of them."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: i, "nvmlDeviceGetUUID": lambda i: f"GPU-{i}".encode(),
        "nvmlDeviceGetMemoryInfo": lambda i: SimpleNamespace(total=100 + i, free=50 + i),
        "nvmlDeviceGetCudaComputeCapability": lambda i: (9, 0), "nvmlDeviceGetCpuAffinity": affinity,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


def test_what_nvml_says_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, lambda i, words: [0xF << 4 * i] + [0] * (words - 1))
    assert devices.list_gpus() == [
        Gpu("GPU-0", 100, 50, (9, 0), frozenset(range(4))),
        Gpu("GPU-1", 101, 51, (9, 0), frozenset(range(4, 8))),
    ]


def test_a_machine_that_does_not_tell_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(handle: int, words: int) -> list[int]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvml(monkeypatch, unknown)
    assert [gpu.near for gpu in devices.list_gpus()] == [frozenset(), frozenset()]
