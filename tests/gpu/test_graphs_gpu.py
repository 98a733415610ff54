"""Recorded steps on a GPU: whatever adapters come after the recording, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")
import parity_tools as tools
from parity_tools import COMMON, TinyModel
from transformers import LlamaConfig

from punica_batch.engine.engine import Engine

ROWS, CONTINUATION = 12, 6
NAMES = [f"a{i}" for i in range(ROWS)]
# which adapter each row has: from none to one a row
MIXES: dict[str, list[str | None]] = {
    "none": [None] * ROWS,
    "one": ["a0"] * ROWS,
    "three": [NAMES[i % 3] for i in range(ROWS)],
    "half without": [NAMES[i] if i % 2 else None for i in range(ROWS)],
    "distinct": list(NAMES),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    config = LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=64)
    model = TinyModel.make(tmp_path_factory.mktemp("llama"), config, seed=7)
    for i, name in enumerate(NAMES):
        model.add_adapter(name, seed=100 + i, r=(1, 3, 8, 16, 33, 64)[i % 6])
    return model


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Engine:
    engine = tiny.engine(
        device="cuda", dtype="float16", kv_cache_dtype="float16", max_num_seqs=ROWS, max_loras=ROWS,
        max_num_batched_tokens=512,
    )  # fmt: skip
    engine.warm_up()
    return engine


@pytest.mark.parametrize("mix", MIXES)
def test_one_engine_serves_any_mix_of_adapters(tiny: TinyModel, engine: Engine, mix: str) -> None:
    """Fewer, as many and more adapters than there were when the graphs were recorded, in turn on one engine."""
    graphs = engine.runner.graphs
    assert graphs is not None
    assert len(graphs) > 0
    lengths = [9 + 3 * i + CONTINUATION for i in range(ROWS)]
    rows = tools.random_rows(MIXES[mix], lengths, seed=5)
    exact, theirs = tiny.reference(rows), tiny.reference(rows, dtype=torch.float16)
    ours = tools.teacher_forced(engine, rows, [n - CONTINUATION for n in lengths])
    assert tools.max_error(ours, exact) <= 2 * tools.max_error(theirs, exact)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "drawn"])
@pytest.mark.parametrize("mix", ["none", "three", "distinct"])
def test_no_step_waits_for_the_device(tiny: TinyModel, engine: Engine, mix: str, temperature: float) -> None:
    """Synchronizing calls in twenty decode steps and the mixed ones among them: the waits for finished steps alone."""
    requests = tools.requests_of(
        tools.random_rows(MIXES[mix], [20] * ROWS, seed=6), max_tokens=60, ignore_eos=True, temperature=temperature
    )
    late = tools.requests_of(
        tools.random_rows(["a1", None], [30, 17], seed=7), max_tokens=40, ignore_eos=True, first=ROWS
    )
    for request in requests[:-2]:
        engine.add(request)
    for _ in range(12):
        engine.step()
    steps = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i in range(steps):
                if i == 5:
                    for request in late:
                        engine.add(request)
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts = {event.key: event.count for event in profiler.key_averages() if "ynchronize" in event.key}
    assert counts.pop("cudaEventSynchronize", 0) <= steps
    assert sum(counts.values()) <= 1, counts  # the profiler's own
    while engine.has_work:
        engine.step()
