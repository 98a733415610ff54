"""Put on a run's PYTHONPATH by tests: watches and sabotages the engine of its worker processes, and nothing else.

JOB_TEST_ENGINE  "real" (default) or "fake": an engine that imports no torch and answers at once (``fake_engine``)
JOB_TEST_LOG     file to which each finished row is appended: "row time pid" a line
JOB_TEST_LOADS   file to which the name of each adapter that is loaded is appended (real engine)
JOB_TEST_STEP    seconds that a step takes at least
JOB_TEST_POISON  rows, "3,17": a step with one of them kills the worker
JOB_TEST_CUDA    rows: a step with one of them raises what torch does when the GPU has failed
JOB_TEST_AWAY    rows: a step with one of them raises StoreAway
JOB_TEST_START   "exit": the worker dies before it is ready; "error": its engine cannot be built
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

ENGINE = "punica_batch.engine.build"
WORKER = "punica_batch.workers.worker"


def _rows(variable: str) -> set[int]:
    return {int(row) for row in os.environ.get(variable, "").split(",") if row}


class WatchedEngine:
    """An engine whose steps are logged and, where the environment asks for it, end badly."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._held: set[int] = set()
        self._poison, self._away = _rows("JOB_TEST_POISON"), _rows("JOB_TEST_AWAY")
        self._cuda = _rows("JOB_TEST_CUDA")
        self._step_seconds = float(os.environ.get("JOB_TEST_STEP", "0"))
        self._log = os.open(os.environ.get("JOB_TEST_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: Any) -> None:
        self._held.add(request.row)
        self._engine.add(request)

    def take_back(self, count: int) -> Any:
        requests = self._engine.take_back(count)
        self._held -= {request.row for request in requests}
        return requests

    def step(self) -> Any:
        if self._held & self._poison:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._held & self._cuda:
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA, or such"
            )
        if self._held & self._away:
            from punica_batch.errors import StoreAway

            raise StoreAway("memory://adapters does not answer: run the same command again later")
        time.sleep(self._step_seconds)
        results = self._engine.step()
        for result in results:
            self._held.discard(result.row)
            os.write(self._log, f"{result.row} {time.time():.3f} {os.getpid()}\n".encode())
        return results


def _watch(module: types.ModuleType) -> None:
    build = module.build_engine

    def build_engine(settings: Any, times: Any = None) -> WatchedEngine:
        how = os.environ.get("JOB_TEST_START")
        if how == "exit":
            print("Illegal instruction in the test's engine", file=sys.stderr)
            sys.stderr.flush()
            os._exit(9)
        if how == "error":
            from punica_batch.errors import ModelError

            raise ModelError("the test's engine finds a tensor missing")
        return WatchedEngine(build(settings, times))

    module.build_engine = build_engine  # type: ignore[attr-defined]
    if "JOB_TEST_LOADS" in os.environ:
        from punica_batch.engine import lora_setup

        lora_setup.adapter_loader = _logged(lora_setup.adapter_loader)


def _logged(adapter_loader: Any) -> Any:
    log = os.open(os.environ["JOB_TEST_LOADS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def make(*arguments: Any) -> Any:
        load = adapter_loader(*arguments)

        def logged(lora_id: str) -> Any:
            os.write(log, f"{lora_id}\n".encode())
            return load(lora_id)

        return logged

    return make


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _watch(module)


class _NoTorch(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.set_num_threads = lambda count: None  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, *, is_fake: bool) -> None:
        self._is_fake = is_fake

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == "torch" and self._is_fake:
            return importlib.util.spec_from_loader(name, _NoTorch())
        if name != ENGINE:
            return None
        spec = (
            importlib.util.spec_from_file_location(name, Path(__file__).parent / "fake_engine.py")
            if self._is_fake
            else importlib.machinery.PathFinder.find_spec(name, path)
        )
        assert spec is not None
        spec.loader = _Loader(spec.loader)
        return spec


if WORKER in sys.orig_argv:
    sys.meta_path.insert(0, _Finder(is_fake=os.environ.get("JOB_TEST_ENGINE") == "fake"))
