"""Compiling the C kernels: a machine that cannot has none, and that is no error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from punica_batch_kernels.attention.types import AttentionShape
from punica_batch_kernels.backend import REFERENCE, kernels_for
from punica_batch_kernels.native.kernels import NativeKernels, load_native

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)


def test_without_a_compiler_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "nothing")
    assert load_native(tmp_path / "cache") is None
    assert kernels_for(CPU, torch.float32, SHAPE, cache=tmp_path / "cache") is REFERENCE


def test_a_compiler_that_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert load_native(tmp_path / "cache") is None


def test_the_library_is_compiled_once(
    native_kernels: NativeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_native(tmp_path) is not None
    monkeypatch.setattr("punica_batch_kernels.native.build._compile", lambda *_: pytest.fail("compiled again"))
    assert load_native(tmp_path) is not None


def test_what_the_kernels_cannot_take_is_the_references(native_kernels: NativeKernels, tmp_path: Path) -> None:
    assert kernels_for(CPU, torch.bfloat16, SHAPE, cache=tmp_path) is REFERENCE
    half_cache = kernels_for(CPU, torch.float32, SHAPE, torch.bfloat16, cache=tmp_path)
    assert half_cache.paged_attention is REFERENCE.paged_attention
    assert half_cache.add_lora is not REFERENCE.add_lora
    assert kernels_for(CPU, torch.float32, SHAPE, cache=tmp_path).paged_attention is not REFERENCE.paged_attention
