"""The KV cache on a GPU that others use, too: smaller, or refused with a reason; and a step's peak against the plan."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("peft")
from parity_tools import COMMON, TinyModel
from transformers import LlamaConfig

from punica_batch.engine.memory import activation_bytes
from punica_batch.engine.startup import EngineWarning
from punica_batch.errors import ModelError
from punica_batch.models.config import ModelConfig
from punica_batch.types import Request, SamplingParams

HALF = {"device": "cuda", "dtype": "float16", "kv_cache_dtype": "float16"}
GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    config = LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=64)
    return TinyModel.make(tmp_path_factory.mktemp("memory"), config, seed=7)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def prompt(length: int) -> NDArray[np.int32]:
    return np.arange(length, dtype=np.int32) % 250


def occupy(leave: int) -> torch.Tensor:
    """What another process might hold: all but ``leave`` bytes of the GPU."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.empty(torch.cuda.mem_get_info()[0] - leave, dtype=torch.uint8, device="cuda")


def test_blocks_are_as_many_as_asked_for_where_they_fit(tiny: TinyModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        engine = tiny.engine(**HALF, num_blocks=300)
    assert engine.settings.num_blocks == 300
    assert engine.stats().kv_blocks_total == 300
    engine.close()


def test_a_gpu_in_use_makes_the_cache_smaller_and_rows_still_run(tiny: TinyModel) -> None:
    others = occupy(6 * GIB)
    with pytest.warns(EngineWarning, match="in place of 500,000,000"):
        engine = tiny.engine(**HALF, num_blocks=500_000_000, gpu_memory_utilization=1.0)
    cache = engine.runner.kv_cache
    assert engine.settings.num_blocks == engine.stats().kv_blocks_total == cache.num_blocks
    assert GIB < cache.nbytes < 6 * GIB
    assert all(len(keys) == len(values) == cache.num_blocks + 1 for keys, values in cache.layers)
    engine.add(Request(0, prompt(40), None, SamplingParams(max_tokens=8)))
    results = [result for _ in range(40) for result in engine.step()]
    assert [result.error for result in results] == [None]
    engine.close()
    del others


def test_no_room_for_one_row_is_an_error_that_says_why(tiny: TinyModel) -> None:
    others = occupy(3 * GIB // 2)
    with pytest.raises(ModelError, match=r"or other processes'.*--gpu-memory-utilization"):
        tiny.engine(**HALF, num_blocks=1000)
    del others


def test_weights_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    config = LlamaConfig(**COMMON | {"hidden_size": 2048, "intermediate_size": 8192}, head_dim=64)
    large = TinyModel.make(tmp_path, config, seed=7)
    others = occupy(64 << 20)
    with pytest.raises(ModelError, match="the weights need"):
        large.engine(**HALF)
    del others


def test_a_step_takes_no_more_than_is_planned(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "vocab_size": 32000}
    tiny = TinyModel.make(tmp_path, LlamaConfig(**COMMON | sizes, num_key_value_heads=8, head_dim=64), seed=7)
    engine = tiny.engine(**HALF, num_blocks=2000, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=256)
    params = SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9)
    for row in range(256):
        engine.add(Request(row, prompt(60), None, params))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    while engine.has_work:
        engine.step()
    peak = torch.cuda.max_memory_allocated() - before
    planned = activation_bytes(ModelConfig.from_folder(tiny.folder), 2048, 256, "float16")
    assert planned / 20 < peak <= planned
    engine.close()
