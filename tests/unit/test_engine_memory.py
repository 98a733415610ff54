"""KV blocks from what is free: as many as asked for, else fewer, else an error that says what takes the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from punica_batch.engine import kv_cache
from punica_batch.engine.kv_cache import KVCache, allocate_kv_cache
from punica_batch.engine.memory import DeviceMemory
from punica_batch.errors import ModelError

GIB = 2**30
MEMORY = DeviceMemory(
    total=100 * GIB, free=80 * GIB, own=15 * GIB, untouched=10 * GIB, adapters=20 * GIB, step=2 * GIB
)  # leaves 48
SIZES: dict[str, Any] = {
    "num_layers": 2, "block_size": 4, "num_kv_heads": 1, "head_dim": 8, "dtype": torch.float32,
    "device": torch.device("cpu"),
}  # fmt: skip


def test_blocks_are_those_asked_for_or_what_is_left_beside_the_scratch_block() -> None:
    assert MEMORY.num_blocks(GIB, wanted=30, needed=4) == 30
    assert MEMORY.num_blocks(GIB, wanted=47, needed=4) == 47
    assert MEMORY.num_blocks(GIB, wanted=48, needed=4) == 47
    assert MEMORY.num_blocks(GIB, wanted=1000, needed=47) == 47


def test_too_little_for_one_row_says_what_takes_the_memory() -> None:
    with pytest.raises(ModelError) as caught:
        MEMORY.num_blocks(GIB, wanted=1000, needed=48)
    text = str(caught.value)
    for words in (
        "needs 49.0 GiB of KV cache", "100.0 GiB 48.0 GiB are left", "15.0 GiB hold weights",
        "5.0 GiB are CUDA's or other processes'", "20.0 GiB are kept for adapters", "2.0 GiB for a step",
        "10.0 GiB by --gpu-memory-utilization", "--max-model-len",
    ):  # fmt: skip
        assert words in text
    full = replace(MEMORY, free=5 * GIB)
    assert full.for_cache == 0
    with pytest.raises(ModelError, match=r"80\.0 GiB are CUDA's or other"):
        full.num_blocks(GIB, wanted=1, needed=1)


def test_the_cache_has_a_block_that_is_nobodys() -> None:
    cache = allocate_kv_cache(num_blocks=5, min_blocks=1, **SIZES)
    assert cache is not None
    assert (cache.num_blocks, cache.scratch_block) == (5, 5)
    assert all(tensor.shape == (6, 4, 1, 8) for pair in cache.layers for tensor in pair)


@pytest.mark.parametrize(("fits", "minimum", "got"), [(100, 1, 100), (95, 1, 90), (70, 1, 64), (70, 70, 70)])
def test_memory_that_goes_meanwhile_makes_it_smaller(
    monkeypatch: pytest.MonkeyPatch, fits: int, minimum: int, got: int
) -> None:
    bounded(monkeypatch, fits)
    cache = allocate_kv_cache(num_blocks=100, min_blocks=minimum, **SIZES)
    assert cache is not None
    assert cache.num_blocks == got


def test_it_gives_up_at_what_one_row_needs_and_after_some_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = bounded(monkeypatch, 10)
    assert allocate_kv_cache(num_blocks=100, min_blocks=80, **SIZES) is None
    assert tries == [100, 90, 81, 80]
    tries.clear()
    assert allocate_kv_cache(num_blocks=100, min_blocks=1, **SIZES) is None
    assert tries == [100, 90, 81, 72, 64, 57]


def bounded(monkeypatch: pytest.MonkeyPatch, fits: int) -> list[int]:
    """A device that has room for ``fits`` blocks; answers the sizes that are tried."""
    tries: list[int] = []

    class Bounded(KVCache):
        def __init__(self, *, num_blocks: int, **sizes: Any) -> None:
            tries.append(num_blocks)
            if num_blocks > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(num_blocks=num_blocks, **sizes)

    monkeypatch.setattr(kv_cache, "KVCache", Bounded)
    return tries
