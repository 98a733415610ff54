"""The adapters' kernels, compiled before rows need them: one that a step finds missing holds it up for 0.2 s, and the
first large prefill finds dozens missing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from punica_batch_kernels.elementwise.types import Rotation
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, RowTiles, tile_bucket
from punica_batch_kernels.sgmv.types import Segments
from torch import Tensor

from punica_batch.engine.kv_cache import KVCache
from punica_batch.models.layers import rope_cos_sin
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora


def warm_up_lora(model: LlamaModel, lora: ModelLora, cache: KVCache, max_rows: int) -> None:
    """Launches whatever a layer may launch for adapters outside of graphs in steps of up to ``max_rows`` rows. What is
    compiled depends on tiles and not on rows, so one row of the base model does, whose keys go to the scratch block."""
    config, device, dtype = model.config, model.device, model.dtype
    layer, groups, (k_cache, v_cache) = model.layers[0], lora.layers[0], cache.layers[0]
    kernels, heads = layer.kernels, config.num_attention_heads
    cos, sin = rope_cos_sin(torch.zeros(1, dtype=torch.int64, device=device), model.frequencies)
    slot = torch.full((1,), cache.scratch_block * cache.block_size, dtype=torch.int64, device=device)
    rotation = Rotation(heads, layer.qk_norm, cos, sin, k_cache, v_cache, slot)

    def row(size: int) -> Tensor:
        return torch.zeros(1, size, dtype=dtype, device=device)

    for segments in _segments(max_rows, device):
        if not segments.all_rows:
            kernels.lora_linear(layer.qkv.apply, row(config.hidden_size), groups.qkv, segments)
        elif kernels.fused is not None:
            kernels.fused.rope_and_write_kv(layer.qkv.apply, row(config.hidden_size), groups.qkv, segments, rotation)
        layer.finish(row(config.q_size), row(config.hidden_size), segments, groups)


def _segments(max_rows: int, device: torch.device) -> Iterator[Segments]:
    """Of every kernel family, with every number of tiles that makes a difference to its configuration."""
    for block_m in (PER_ROW, GROUPED, PREFILL):
        count, most = 1, tile_bucket(max_rows)  # of one row each at the most
        while count <= most:
            tiles = RowTiles.build([0, 1], [-1], device, block_m, count)
            for all_rows in (False, True)[: 1 + (block_m == PREFILL)]:
                yield Segments((0, 1), (-1,), (tiles,), all_rows)
            count *= 2
