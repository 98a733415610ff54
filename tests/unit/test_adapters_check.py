"""Pre-flight: one report an adapter, in order; one bad adapter spoils nothing; a store that is away ends it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from adapter_files import MODULES, write_adapter

from punica_batch.adapters import check
from punica_batch.adapters.check import check_adapter, check_adapters
from punica_batch.adapters.peft import inspect_adapter
from punica_batch.errors import StoreAway
from punica_batch.types import AdapterSpec


def spec(path: Path) -> AdapterSpec:
    return AdapterSpec(path.name, str(path))


def test_a_good_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "good", r=3)
    report = check_adapter(spec(folder), MODULES, "org/model")
    assert (report.name, report.ok, report.error, report.warnings) == ("good", True, None, ())
    assert (report.rank, report.targets) == (3, ("q_proj",))
    assert report.nbytes == (folder / "adapter_model.safetensors").stat().st_size


def test_a_bad_adapter_is_reported_not_raised(tmp_path: Path) -> None:
    report = check_adapter(spec(write_adapter(tmp_path / "bad", use_dora=True)), MODULES)
    assert not report.ok
    assert "use_dora" in str(report.error)
    report = check_adapter(spec(tmp_path / "none"), MODULES)
    assert not report.ok
    assert "adapter_config.json" in str(report.error)


@pytest.mark.parametrize(
    ("trained_on", "model", "warns"),
    [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf", False),
        ("meta-llama/Llama-2-7b-hf", "/models/Llama-2-7b-hf/", False),
        ("meta-llama/Llama-2-7b-hf", "/hub/models--meta-llama--Llama-2-7b-hf/snapshots/0123abc", False),
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf", True),
        ("mistralai/Mistral-7B", "/models/Llama-2-7b-hf", True),
        (None, "/models/Llama-2-7b-hf", False),
        ("a/b", None, False),
    ],
)
def test_another_base_model_is_a_warning(tmp_path: Path, trained_on: Any, model: Any, warns: bool) -> None:
    folder = write_adapter(tmp_path / "a", base_model_name_or_path=trained_on)
    report = check_adapter(spec(folder), MODULES, model)
    assert report.ok
    assert any("was trained on" in warning for warning in report.warnings) == warns


def test_pattern_warnings_are_passed_on(tmp_path: Path) -> None:
    report = check_adapter(spec(write_adapter(tmp_path / "a", alpha_pattern={"nothing": 3})), MODULES)
    assert report.ok
    assert "'nothing'" in report.warnings[0]


def test_many_are_checked_in_order_and_one_bad_one_spoils_nothing(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / f"a{i:03}", r=1 + i % 4) for i in range(100)]
    (folders[41] / "adapter_config.json").write_text("{")
    reports = list(check_adapters(map(spec, folders), MODULES, threads=4))
    assert [report.name for report in reports] == [folder.name for folder in folders]
    assert [report.name for report in reports if not report.ok] == ["a041"]
    assert [report.rank for report in reports[:4]] == [1, 2, 3, 4]
    assert list(check_adapters([], MODULES)) == []


def test_a_store_that_is_away_ends_the_check_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    folders = [write_adapter(tmp_path / f"a{i:03}") for i in range(60)]
    tried: list[str] = []

    def inspect(adapter: AdapterSpec, options: Any) -> Any:
        tried.append(adapter.name)
        if adapter.name == "a003":
            raise StoreAway("away")
        return inspect_adapter(adapter, options)

    monkeypatch.setattr(check, "inspect_adapter", inspect)
    reports = check_adapters(map(spec, folders), MODULES, threads=2)
    assert [next(reports).name for _ in range(3)] == ["a000", "a001", "a002"]
    with pytest.raises(StoreAway):
        next(reports)
    assert len(tried) < 30


def test_threads_work_at_once_and_memory_stays_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_adapter(tmp_path / "a")
    busy, most, lock = [0], [0], threading.Lock()

    def inspect(adapter: AdapterSpec, options: Any) -> Any:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        time.sleep(0.005)
        with lock:
            busy[0] -= 1
        return inspect_adapter(adapter, options)

    monkeypatch.setattr(check, "inspect_adapter", inspect)
    taken = [0]

    def specs() -> Any:
        for _ in range(200):
            taken[0] += 1
            yield spec(folder)

    reports = check_adapters(specs(), MODULES, threads=4)
    next(reports)
    assert taken[0] <= 17
    assert len(list(reports)) == 199
    assert most[0] == 4
