"""FlashInfer's modules are built side by side, and one that fails does not keep the others."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from punica_batch_kernels import prebuild
from punica_batch_kernels.prebuild import build_modules

NINJA = "Ninja build failed. Ninja output:\n[1/2] nvcc -c norm.cu\nFAILED: norm.o\nnorm.cu(3): error: no such type\nend"


@dataclass
class Spec:
    """As FlashInfer's ``JitSpec``."""

    is_compiled: bool = False
    is_aot: bool = False
    error: Exception | None = None
    gate: threading.Barrier | None = None
    builds: list[bool] = field(default_factory=list)

    def build(self, verbose: bool) -> None:
        self.builds.append(verbose)
        if self.gate is not None:
            self.gate.wait(timeout=30)
        if self.error is not None:
            raise self.error


def test_each_is_told_of_with_what_became_of_it() -> None:
    specs = {
        "new": Spec(), "there": Spec(is_compiled=True), "shipped": Spec(is_compiled=True, is_aot=True),
        "bad": Spec(error=RuntimeError(NINJA)), "none": Spec(error=FileNotFoundError("ninja")),
    }  # fmt: skip
    builds = {build.name: build for build in build_modules(list(specs.items()))}
    assert set(builds) == set(specs)
    assert {name for name, build in builds.items() if build.was_there} == {"there", "shipped"}
    assert {name: build.error for name, build in builds.items() if build.error} == {
        "bad": "RuntimeError: norm.cu(3): error: no such type", "none": "FileNotFoundError: ninja",
    }  # fmt: skip
    assert specs["there"].builds == [False], "ninja decides whether it is up to date"
    assert specs["shipped"].builds == []


def test_they_are_built_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    gate = threading.Barrier(3)
    modules: list[tuple[str, Any]] = [(str(i), Spec(gate=gate)) for i in range(3)]
    assert [build.error for build in build_modules(modules)] == [None] * 3


def test_few_cores_build_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    gate = threading.Barrier(2)
    monkeypatch.setattr(gate, "wait", lambda timeout: threading.Barrier.wait(gate, 0.3))
    builds = list(build_modules([("a", Spec(gate=gate)), ("b", Spec(gate=gate))]))
    assert all(build.error and build.error.startswith("BrokenBarrierError") for build in builds)
    assert prebuild._CORES_A_MODULE == 2
