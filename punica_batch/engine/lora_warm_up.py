"""The adapters' kernels, compiled before rows need them: one that a step finds missing holds it up for 0.2 s, and the
first large prefill finds dozens missing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from punica_batch_kernels.elementwise.types import Rotation
from punica_batch_kernels.sgmv.tiles import GROUPED, MAX_FEW, PER_ROW, PREFILL, RowTiles, tile_bucket
from punica_batch_kernels.sgmv.types import Segments
from torch import Tensor

from punica_batch.engine.kv_cache import KVCache
from punica_batch.models.layers import rope_cos_sin
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora


def warm_up_lora(model: LlamaModel, lora: ModelLora, cache: KVCache, max_rows: int) -> None:
    """Launches whatever a layer may launch for adapters in steps of up to ``max_rows`` rows. What is compiled depends
    on tiles and not on rows, so one row of the base model does, whose keys go to the scratch block. Adapters of the
    head, of which few jobs have any, are left out."""
    device, layer, groups = model.device, model.layers[0], lora.layers[0]
    kernels, (k_cache, v_cache) = layer.kernels, cache.layers[0]
    cos, sin = rope_cos_sin(torch.zeros(1, dtype=torch.int64, device=device), model.frequencies)
    slot = torch.full((1,), cache.scratch_block * cache.block_size, dtype=torch.int64, device=device)
    heads = model.config.num_attention_heads
    rotation = Rotation(heads, layer.qk_norm, cos, sin, k_cache, v_cache, slot)
    pairs = (
        (layer.qkv, groups.qkv), (layer.o, groups.o), (layer.gate_up, groups.gate_up), (layer.down, groups.down),
    )  # fmt: skip

    def row(size: int) -> Tensor:
        return torch.zeros(1, size, dtype=model.dtype, device=device)

    for segments, is_few in _segments(max_rows, device):
        for linear, group in pairs:
            kernels.lora_linear(linear.apply, row(group.in_features), group, segments)
            if is_few and kernels.captured_lora_linear is not None:
                kernels.captured_lora_linear(linear.apply, row(group.in_features), group, segments)
        if segments.all_rows and kernels.fused is not None:
            x = row(model.config.hidden_size)
            kernels.fused.rope_and_write_kv(layer.qkv.apply, x, groups.qkv, segments, rotation)
            kernels.fused.silu_and_mul(layer.gate_up.apply, x, groups.gate_up, segments)


def _segments(max_rows: int, device: torch.device) -> Iterator[tuple[Segments, bool]]:
    """Of every kernel family, with every number of tiles that makes a difference to its configuration; and whether so
    few rows can have them."""
    for block_m in (PER_ROW, GROUPED, PREFILL):
        count, most = 1, tile_bucket(max_rows)  # of one row each at the most
        while count <= most:
            tiles = RowTiles.build([0, 1], [-1], device, block_m, count)
            yield Segments((0, 1), (-1,), (tiles,), block_m == PREFILL), block_m != PREFILL and count <= MAX_FEW
            count *= 2
