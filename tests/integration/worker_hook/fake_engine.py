"""Stands in for ``punica_batch.engine.build`` in the workers of tests that are about processes and files.

An answer depends on the row's prompt, adapter and sampling alone, so every run of a row gives the same one. Rows run
in a batch of ``max_num_seqs``, one after another in the order of arrival, and end after 1 to 3 steps.
"""

from __future__ import annotations

import hashlib

from punica_batch.adapters.peft import inspect_adapter
from punica_batch.adapters.weights import adapter_digest
from punica_batch.engine.settings import EngineSettings
from punica_batch.types import Completion, FinishReason, Request, RowResult, WorkerStats


class FakeEngine:
    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._waiting: list[Request] = []
        self._running: list[tuple[Request, int]] = []  # (row, steps left)
        self._digests: dict[str, str] = {}
        self._steps = 0

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def take_back(self, count: int) -> list[Request]:
        kept = max(0, len(self._waiting) - count)
        self._waiting, taken = self._waiting[:kept], self._waiting[kept:]
        return taken

    def step(self) -> list[RowResult]:
        self._steps += 1
        while self._waiting and len(self._running) < self.settings.max_num_seqs:
            request = self._waiting.pop(0)
            self._running.append((request, 1 + request.row % 3))
        ended = [self._answer(request) for request, left in self._running if left == 1]
        self._running = [(request, left - 1) for request, left in self._running if left > 1]
        return ended

    def _answer(self, request: Request) -> RowResult:
        key = repr((request.prompt_token_ids.tolist(), request.lora_id, request.sampling))
        text = hashlib.sha256(key.encode()).hexdigest()[:12]
        sample = Completion(tuple(range(1 + len(key) % 5)), text, FinishReason.STOP)
        digest = None if request.lora_id is None else self._digest(request.lora_id)
        return RowResult(request.row, request.num_prompt_tokens, (sample,) * request.sampling.n, adapter_sha256=digest)

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = adapter_digest(inspect_adapter(self.settings.adapters[name]))
        return self._digests[name]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def stats(self) -> WorkerStats:
        return WorkerStats(
            running=len(self._running), waiting=len(self._waiting), kv_blocks_used=0,
            kv_blocks_total=self.settings.num_blocks, adapters_resident=0, prompt_tokens=0, generated_tokens=0,
            preemptions=0, steps=self._steps,
        )  # fmt: skip


def build_engine(settings: EngineSettings, times: object = None) -> FakeEngine:
    return FakeEngine(settings)
