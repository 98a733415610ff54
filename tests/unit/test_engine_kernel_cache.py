"""The environment in which GPU kernels are compiled and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from punica_batch.engine.kernel_cache import kernel_environment

NAMES = {"FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a" / "cache"
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(folder))
    return folder


def test_everything_goes_into_the_cache_folder(cache: Path) -> None:
    assert kernel_environment((9, 0), {}) == {
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    assert cache.is_dir(), "FlashInfer needs it on import"
    assert kernel_environment((8, 9), {})["FLASHINFER_CUDA_ARCH_LIST"] == "8.9"
    assert set(kernel_environment(None, {})) == NAMES - {"FLASHINFER_CUDA_ARCH_LIST"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_the_user_has_set_stays(cache: Path, name: str) -> None:
    assert set(kernel_environment((9, 0), {name: "own"})) == NAMES - {name}
    assert set(kernel_environment((9, 0), {name: ""})) == NAMES


def test_tritons_other_variable_counts_too(cache: Path) -> None:
    assert "TRITON_CACHE_DIR" not in kernel_environment((9, 0), {"TRITON_HOME": "/own"})


def test_a_relative_cache_is_the_same_for_processes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PUNICA_BATCH_CACHE", "here")
    assert kernel_environment(None, {})["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path / "here")


def test_a_cache_that_takes_no_files_leaves_the_libraries_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(tmp_path / "file" / "cache"))
    assert set(kernel_environment((9, 0), {})) == {"FLASHINFER_CUDA_ARCH_LIST"}
