"""What the warm-up launches is all that a step may launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_harness import ARCHITECTURES, BLOCK, SIZES
from punica_batch_kernels.backend import REFERENCE
from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.tiles import MAX_FEW, plan_families, take_all_rows, tile_bucket
from punica_batch_kernels.sgmv.triton_config import choose_config, rope_rule, silu_rule
from punica_batch_kernels.sgmv.types import LoraGroup, Segments
from torch import Tensor

from punica_batch.engine.kv_cache import KVCache
from punica_batch.engine.lora_warm_up import warm_up_lora
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora
from punica_batch.models.weights import random_weights

pytest.importorskip("triton")
MAX_ROWS, MAX_RANK = 8448, 16
Kernel = tuple[Any, ...]
Base = Callable[[Tensor], Tensor]


def kernels_of(group: LoraGroup, tiles: list[tuple[int, int]], fused: str | None) -> set[Kernel]:
    """As the launches' keys tell compiled kernels apart: a configuration but for its number of programs, and whether
    programs take tiles in turn."""
    widths, found = tuple(group.out_widths), set[Kernel]()
    for block_m, count in tiles:
        shrink, expand = choose_config(block_m, count, group.in_features, widths, MAX_RANK, 2, "h200")
        found.add((block_m, group.in_features, widths, replace(shrink, programs=0)))
        if fused is None:
            in_turn = count > {1: 256, 16: 32}.get(block_m, count)
            found.add((block_m, group.in_features, widths, shrink.split_k, shrink.block_r, expand, in_turn))
        else:
            rule = {"rope": rope_rule, "silu": silu_rule}[fused]
            found.add((fused, block_m, shrink.split_k, shrink.block_r, rule(count, MAX_RANK, 2)))
    return found


class Recorded:
    """``FusedProducts`` and ``LoraLinear`` that note what would be launched."""

    def __init__(self) -> None:
        self.kernels = set[Kernel]()
        self.captured = set[Kernel]()

    def note(self, group: LoraGroup, segments: Segments, fused: str | None = None) -> None:
        assert segments.tiles is not None
        tiles = [(each.block_m, each.entries.shape[0]) for each in segments.tiles]
        self.kernels |= kernels_of(group, tiles, fused)

    def linear(self, base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        self.note(group, segments)
        return base(x)

    def capture(self, base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        known, self.kernels = self.kernels, self.captured
        self.note(group, segments)
        self.kernels = known
        return base(x)

    def rope_and_write_kv(self, base: Base, x: Tensor, group: LoraGroup, segments: Segments, rotation: Any) -> Tensor:
        self.note(group, segments, "rope")
        qkv = base(x).view(1, -1, rotation.k_cache.shape[3])
        REFERENCE.rope_and_write_kv(qkv, rotation)
        return qkv

    def silu_and_mul(self, base: Base, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        self.note(group, segments, "silu")
        return REFERENCE.silu_and_mul(base(x))


def warmed_up(name: str = "llama3") -> tuple[Recorded, ModelLora, KVCache]:
    kind, changes = ARCHITECTURES[name]
    config = ModelConfig.from_dict(kind(**(SIZES | changes), architectures=["LlamaForCausalLM"]).to_dict(), where="x")
    recorded = Recorded()
    kernels = replace(REFERENCE, add_lora=reference.add_lora, ordered_lora_linear=recorded.linear, fused=recorded)
    kernels = replace(kernels, captured_lora_linear=recorded.capture)
    model: LlamaModel = random_weights(config, torch.float32, "cpu", kernels=kernels)
    cache = KVCache(
        num_layers=3, num_blocks=2, block_size=BLOCK, num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    for pair in cache.layers:
        for tensor in pair:
            tensor.fill_(7)
    lora = ModelLora.empty(config, 2)
    with torch.inference_mode():
        warm_up_lora(model, lora, cache, MAX_ROWS)
    return recorded, lora, cache


RECORDED, LORA, CACHE = warmed_up()
WARM = RECORDED.kernels


def test_only_the_scratch_block_is_written_to() -> None:
    for keys, values in CACHE.layers:
        assert (keys[:-1] == 7).all()
        assert (values[:-1] == 7).all()


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.just(1), st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=300),
    base=st.lists(st.booleans(), min_size=300, max_size=300),
)
def test_no_step_launches_anything_else(lengths: list[int], base: list[bool]) -> None:
    starts = [0, *(n for n in accumulate(lengths) if n <= MAX_ROWS)]
    slots = [-1 if without else i for i, without in zip(range(len(starts) - 1), base, strict=False)]
    all_rows = take_all_rows(starts, slots)
    families = plan_families(starts, slots, all_rows=all_rows)
    tiles = [(family.block_m, family.num_tiles) for family in families]
    layer = LORA.layers[0]
    for group, fused in ((layer.qkv, "rope"), (layer.gate_up, "silu"), (layer.o, None), (layer.down, None)):
        assert kernels_of(group, tiles, fused if all_rows else None) <= WARM


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=64))
def test_no_capture_of_few_rows_launches_anything_else(lengths: list[int]) -> None:
    """Its tiles are padded: those of single rows to the step's rows, others to their bucket."""
    starts = [0, *(n for n in accumulate(lengths) if n <= MAX_FEW)]
    families = plan_families(starts, range(len(starts) - 1))
    rows = starts[-1]
    tiles = [(f.block_m, tile_bucket(rows if f.block_m == 1 else f.num_tiles)) for f in families]
    layer = LORA.layers[0]
    for group in (layer.qkv, layer.gate_up, layer.o, layer.down):
        assert kernels_of(group, tiles, None) <= RECORDED.captured


def test_the_steps_differ() -> None:
    """There would be nothing to find out if one kernel served them all."""
    assert len(WARM) > 20
    assert np.unique([kernel[0] for kernel in WARM if isinstance(kernel[0], int)]).tolist() == [1, 16, 64]
