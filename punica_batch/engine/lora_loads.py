"""Loads of adapters under way on threads, and what they came to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue

from punica_batch_kernels.native.openmp import use_one_thread

from punica_batch.engine.lora_types import LoadedLora, LoadStats

Outcome = LoadedLora | BaseException


class Loads:
    """``start`` them and ``take`` them as they end, in the order in which they do; from one thread."""

    def __init__(self, load: Callable[[str], LoadedLora], num_threads: int) -> None:
        self._load = load
        self._under_way: set[str] = set()  # not taken yet
        self._ended: SimpleQueue[tuple[str, Outcome]] = SimpleQueue()
        self._seen: deque[tuple[str, Outcome]] = deque()  # out of _ended while waiting
        self._stats = LoadStats()
        self._stats_lock = threading.Lock()
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="lora-load", initializer=use_one_thread)

    def __contains__(self, lora_id: str) -> bool:
        return lora_id in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def under_way(self) -> frozenset[str]:
        return frozenset(self._under_way)

    @property
    def stats(self) -> LoadStats:
        with self._stats_lock:
            return self._stats

    def start(self, lora_id: str) -> None:
        assert lora_id not in self._under_way
        self._under_way.add(lora_id)
        self._executor.submit(self._run, lora_id)

    def take(self) -> tuple[str, Outcome] | None:
        """One that has ended: whose it was, and the loaded adapter or what was raised."""
        try:
            ended = self._seen.popleft() if self._seen else self._ended.get_nowait()
        except Empty:
            return None
        self._under_way.remove(ended[0])
        return ended

    def wait(self, timeout: float) -> None:
        """Returns when one has ended, or after ``timeout`` seconds."""
        if not self._seen:
            with suppress(Empty):
                self._seen.append(self._ended.get(timeout=timeout))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, lora_id: str) -> None:
        began = time.perf_counter()
        try:
            loaded = self._load(lora_id)
        except BaseException as error:
            self._ended.put((lora_id, error))
            return
        took = time.perf_counter() - began
        with self._stats_lock:
            old = self._stats
            self._stats = LoadStats(old.adapters + 1, old.bytes_copied + loaded.bytes_copied, old.seconds + took)
        self._ended.put((lora_id, loaded))
