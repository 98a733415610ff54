"""Checks before any work: does each adapter fit the model? Config and header only; contents when they load."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from punica_batch.adapters.peft import bind_adapter, inspect_adapter
from punica_batch.errors import AdapterError
from punica_batch.types import AdapterSpec

_MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """One adapter's check. ``error`` is None when ``ok``; ``rank`` is the largest, ``targets`` the adapted kinds of
    module (``q_proj`` …, sorted), ``nbytes`` the weights file's size; 0 and () where it could not be read.
    """

    name: str
    ok: bool
    error: str | None = None
    warnings: tuple[str, ...] = ()
    rank: int = 0
    targets: tuple[str, ...] = ()
    nbytes: int = 0


def check_adapter(
    spec: AdapterSpec,
    modules: Mapping[str, tuple[int, int]],
    base_model_name: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> AdapterReport:
    """Inspects and binds one adapter. What is wrong with it is in the report; ``StoreAway`` is raised.

    ``modules``: the model's linear and embedding layers, name → (out, in). ``base_model_name``: its path or hub name.
    """
    try:
        files = inspect_adapter(spec, storage_options)
        bound = bind_adapter(files, modules)
    except AdapterError as exc:
        return AdapterReport(spec.name, ok=False, error=str(exc))
    warnings = files.config.warnings(modules)
    trained_on = files.base_model_name
    if trained_on and base_model_name and _model_key(trained_on) != _model_key(base_model_name):
        warnings.insert(0, f"it was trained on {trained_on[:200]!r}, the job's model is {base_model_name!r}")
    return AdapterReport(
        name=spec.name,
        ok=True,
        warnings=tuple(warnings),
        rank=max(module.rank for module in bound.values()),
        targets=tuple(sorted({module.rpartition(".")[2] for module in bound})),
        nbytes=files.nbytes,
    )


def check_adapters(
    specs: Iterable[AdapterSpec],
    modules: Mapping[str, tuple[int, int]],
    base_model_name: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int = _MAX_THREADS,
) -> Iterator[AdapterReport]:
    """``check_adapter`` for many, on threads; reports come in the order of ``specs``, a few at a time in memory.

    The first ``StoreAway`` is raised and what has not begun is not tried: a store that is away is so for all.
    """
    stop = threading.Event()

    def check(spec: AdapterSpec) -> AdapterReport | None:
        return None if stop.is_set() else check_adapter(spec, modules, base_model_name, storage_options)

    remaining = iter(specs)
    with ThreadPoolExecutor(threads, thread_name_prefix="check-adapter") as pool:
        pending: list[Future[AdapterReport | None]] = [pool.submit(check, s) for s in islice(remaining, 4 * threads)]
        try:
            while pending:
                report = pending.pop(0).result()
                assert report is not None  # only skipped after stop
                pending += [pool.submit(check, spec) for spec in islice(remaining, 1)]
                yield report
        finally:
            stop.set()


def _model_key(name: str) -> str:
    """What names a model wherever it lies: the last component, or the repository of a Hugging Face cache folder."""
    cached = re.search(r"models--.+?--([^/]+)/snapshots/", name)
    return (cached[1] if cached else name.rstrip("/").rpartition("/")[2]).lower()
