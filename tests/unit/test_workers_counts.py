"""What a worker has computed, over its restarts, and how fast it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from punica_batch.types import Request, SamplingParams, WorkerStats
from punica_batch.workers import pool
from punica_batch.workers.pool import Worker, WorkerSpec

NOTHING = WorkerStats(
    running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=10, adapters_resident=0, prompt_tokens=0,
    generated_tokens=0, preemptions=0, steps=0,
)  # fmt: skip


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pool, "time", clock)
    return clock


@pytest.fixture
def worker() -> Worker:
    worker = Worker(WorkerSpec("0", None))
    worker.add([Request(row=0, lora_id=None, prompt_token_ids=np.ones(1, np.int32), sampling=SamplingParams())])
    return worker


def test_tokens_are_counted_over_all_lives(worker: Worker, clock: Clock) -> None:
    worker.observe(replace(NOTHING, prompt_tokens=50, generated_tokens=10))
    worker.observe(replace(NOTHING, prompt_tokens=70, generated_tokens=30))
    assert (worker.prompt_tokens, worker.generated_tokens) == (70, 30)
    worker.stats = None  # as at a restart
    clock.now += 2.0
    worker.observe(replace(NOTHING, prompt_tokens=5, generated_tokens=4))
    assert (worker.prompt_tokens, worker.generated_tokens) == (75, 34)
    assert worker.tokens_per_s == pytest.approx(24 / 2.0), "never negative"


def test_the_rate_is_that_of_the_last_ten_seconds(worker: Worker, clock: Clock) -> None:
    worker.observe(NOTHING)
    assert worker.tokens_per_s == 0.0
    for second in range(1, 41):
        clock.now = 100.0 + second
        worker.observe(replace(NOTHING, generated_tokens=100 * min(second, 20) + 10 * max(0, second - 20)))
        if second == 25:
            assert worker.tokens_per_s == pytest.approx(50.0)  # 4 s at 100, 5 s at 10
    assert worker.tokens_per_s == pytest.approx(10.0)


def test_steps_longer_than_that_have_a_rate_and_an_idle_worker_has_none(worker: Worker, clock: Clock) -> None:
    worker.observe(NOTHING)
    clock.now += 30.0
    worker.observe(replace(NOTHING, generated_tokens=60))
    assert worker.tokens_per_s == pytest.approx(2.0)
    worker.remove_all()
    assert worker.tokens_per_s == 0.0
