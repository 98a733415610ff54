"""What a Python ``Engine`` plans with on a GPU, whose rows nobody has counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from punica_batch.bench.shapes import shape_config
from punica_batch.config import JobConfig
from punica_batch.engine import generate
from punica_batch.engine.settings import EngineSettings
from punica_batch.types import AdapterSpec

GIB = 1 << 30
MODEL = shape_config("8b")
LINEAR = sum(sum(shape) for shape in MODEL.lora_modules().values())


def settings(monkeypatch: pytest.MonkeyPatch, free: int, adapters: int, **options: Any) -> EngineSettings:
    monkeypatch.setattr(generate, "_memory_bytes", lambda device: free)
    monkeypatch.setattr(generate, "kernel_environment", lambda capability: {})
    names = [f"a{i}" for i in range(adapters)]
    registry: Any = SimpleNamespace(
        names=lambda: names, get=lambda name: AdapterSpec(name, f"/{name}"), storage_options={}
    )
    config = JobConfig(inputs=("-",), model="m", device="cuda", dtype="bfloat16", **options)
    return generate._settings(config, MODEL, Path("m"), Path("m"), registry, adapters)


@pytest.mark.parametrize("free", [24 * GIB, 40 * GIB, 141 * GIB])
@pytest.mark.parametrize("adapters", [0, 1, 100])
def test_a_batch_is_as_large_as_a_jobs(monkeypatch: pytest.MonkeyPatch, free: int, adapters: int) -> None:
    """Rows seldom have the model's whole context, and too many at a time cost preemptions alone."""
    made = settings(monkeypatch, free, adapters, max_model_len=8192)
    assert made.max_num_seqs == 256
    assert settings(monkeypatch, free, adapters, max_model_len=8192, max_num_seqs=7).max_num_seqs == 7


def test_adapters_get_no_more_than_they_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(monkeypatch, 141 * GIB, 0, max_model_len=8192).max_lora_bytes is None
    one = settings(monkeypatch, 141 * GIB, 1, max_model_len=8192)
    assert one.max_lora_bytes == 256 * LINEAR * 2
    few = settings(monkeypatch, 141 * GIB, 3, max_model_len=8192, max_lora_rank=16)
    assert few.max_lora_bytes == 3 * 16 * LINEAR * 2
    many = settings(monkeypatch, 141 * GIB, 1000, max_model_len=8192)
    assert 20 * GIB < (many.max_lora_bytes or 0) < 40 * GIB
    assert many.num_blocks > one.num_blocks // 2
