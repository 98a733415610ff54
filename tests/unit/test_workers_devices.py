"""Which devices a job gets: what was asked for, or an error that says what there is."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from punica_batch.config import JobConfig
from punica_batch.errors import JobError, UsageError
from punica_batch.workers import devices
from punica_batch.workers.devices import Gpu, choose_gpus, cpu_devices, find_devices, visible_gpus

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
    with pytest.raises(UsageError, match="no NVIDIA device"):
        find_devices(JobConfig(gpus="1"), lines.append)


def test_a_device_whose_driver_is_silent_is_never_a_cpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setattr(devices, "_has_nvidia_device", lambda: True)
    with pytest.raises(JobError, match="driver does not answer"):
        find_devices(JobConfig(), lambda line: None)
