"""Put on a run's PYTHONPATH by ``scale_run``: counts groups, adapter loads and steps, and can stand in for the engine.

SCALE_COUNTS  folder that gets ``parent.json`` and ``worker.json``, rewritten while the run goes on
SCALE_ENGINE  "stub": workers that answer each row at once and never import torch, to find what the parent can do
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTS = Path(os.environ.get("SCALE_COUNTS", os.devnull))
WRITE_SECONDS = 0.5


class Counts:
    """Numbers by name, in a file that is replaced whole."""

    def __init__(self, name: str) -> None:
        self._path = COUNTS / f"{name}.json"
        self._values: dict[str, float] = {}
        self._next_write = 0.0

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values[name] = self._values.get(name, 0) + value

    def set_once(self, name: str, value: float) -> None:
        if name not in self._values:
            self._values[name] = value
            self._next_write = 0.0

    def write(self) -> None:
        now = time.monotonic()
        if now >= self._next_write:
            self._next_write = now + WRITE_SECONDS
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self._values))
            draft.replace(self._path)


def watch_pool(module: types.ModuleType) -> None:
    counts, submit, poll = Counts("parent"), module.LocalPool.submit, module.LocalPool.poll
    last: list[object] = [None]

    def counted_submit(self: Any, name: str, requests: Any) -> None:
        counts.add(sends=1, rows=len(requests), turns=requests[0].lora_id != last[0])
        last[0] = requests[0].lora_id
        submit(self, name, requests)

    def counted_poll(self: Any, *args: Any) -> Any:
        events = poll(self, *args)
        if any(event.finished for event in events):
            counts.set_once("first_row_at", time.time())
        counts.write()
        return events

    module.LocalPool.submit, module.LocalPool.poll = counted_submit, counted_poll


def watch_engine(module: types.ModuleType) -> None:
    counts = Counts("worker")
    if os.environ.get("SCALE_ENGINE") == "stub":
        module.build_engine = StubEngine
        return
    import torch

    torch.set_num_threads(1)  # a second one only waits, with a model as small as this
    torch.set_num_threads = lambda count: None  # type: ignore[assignment]
    from punica_batch.engine import engine

    step, build_arrays = engine.Engine.step, engine.build_arrays
    resident: set[str] = set()

    def counted_arrays(batch: Any, block_size: int) -> Any:
        arrays = build_arrays(batch, block_size)
        counts.add(
            steps=1, sequences=len(arrays.sequences), tokens=arrays.num_tokens, segments=len(arrays.segment_lora_ids)
        )
        return arrays

    def counted_step(self: Any) -> Any:
        results = step(self)
        now = set(self.lora_store.resident)
        if now != resident:
            counts.add(loads=len(now - resident))
            resident.clear()
            resident.update(now)
        counts.write()
        return results

    engine.Engine.step, engine.build_arrays = counted_step, counted_arrays


class StubEngine:
    """Answers what it has after one step, without a model."""

    def __init__(self, settings: Any, times: Any = None) -> None:
        from punica_batch.types import Completion, FinishReason

        self.settings = settings
        self._waiting: list[Any] = []
        self._completions = (Completion((17,), " yes", FinishReason.LENGTH),)

    def add(self, request: Any) -> None:
        self._waiting.append(request)

    def step(self) -> list[Any]:
        from punica_batch.types import RowResult

        size = self.settings.max_num_seqs
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        return [
            RowResult(r.row, r.num_prompt_tokens, self._completions, adapter_sha256=r.lora_id and "0" * 64)
            for r in batch
        ]

    def take_back(self, count: int) -> list[Any]:
        return []

    def prefetch(self, lora_ids: Any) -> None:
        pass

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def stats(self) -> Any:
        from punica_batch.types import WorkerStats

        return WorkerStats(0, len(self._waiting), 0, self.settings.num_blocks, 0, 0, 0, 0, 0)


PATCHES: dict[str, Callable[[types.ModuleType], None]] = {
    "punica_batch.workers.pool": watch_pool,
    "punica_batch.engine.build": watch_engine,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Callable[[types.ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        spec.loader = _Loader(spec.loader, PATCHES[name])
        return spec


if "SCALE_COUNTS" in os.environ:
    sys.meta_path.insert(0, _Finder())
