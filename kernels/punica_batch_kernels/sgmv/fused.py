"""The expand inside the kernel that follows the product: rotation and KV write after Q/K/V, activation after gate/up.

What the product with adapters would store and that kernel read again is most of what the add-on moves in a prefill. It
is for segments with ``all_rows``, whose rows are all in tall tiles, base rows in some of slot -1. ``config``, where it
is given, is used in place of the rule's choice.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import triton
from torch import Tensor

from punica_batch_kernels.elementwise.types import QKNorm, Rotation
from punica_batch_kernels.launch import Launcher, has_pdl
from punica_batch_kernels.sgmv.fused_kernels import expand_rope_kernel, expand_silu_kernel
from punica_batch_kernels.sgmv.tiles import RowTiles
from punica_batch_kernels.sgmv.triton_backend import Plan, plans_of, table_of
from punica_batch_kernels.sgmv.triton_config import ExpandConfig, rope_rule, silu_rule, slice_columns
from punica_batch_kernels.sgmv.types import LoraGroup, Segments

launch_silu, launch_rope = Launcher(expand_silu_kernel, aligned=3), Launcher(expand_rope_kernel, aligned=2)


def expand_silu(
    gate_up: Tensor, v: Tensor, group: LoraGroup, segments: Segments, config: ExpandConfig | None = None
) -> Tensor:
    """silu(gate) * up of [T, 2 m] with the adapters of ``v`` added to both: a new tensor [T, m].

    ``gate_up`` contiguous, without them; ``v``: the shrink's for this group.
    """
    table, size = table_of(group), gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], size)
    pdl = has_pdl(gate_up.get_device())
    for plan, tiles in plans_of(gate_up, group, segments):
        chosen = config or silu_rule(tiles.entries.shape[0], plan.max_rank, gate_up.itemsize)
        constants = {"SIZE": size, "BLOCK_N": chosen.block_n, "BLOCKS": chosen.blocks}
        constants |= _shared(plan, tiles, chosen, pdl)
        numbers = (v.shape[1], v.stride(1), table.entries.stride(0), plan.config[0].programs)
        launch_silu(
            (*constants.values(), gate_up.dtype, gate_up.get_device(), *numbers[1:3]),
            tiles.entries.shape[0] * triton.cdiv(size, chosen.block_n * chosen.blocks),
            (out, gate_up, v, tiles.entries, table.entries), numbers, partial(_options, constants, pdl),
        )  # fmt: skip
    return out


def expand_rope_and_write_kv(
    qkv: Tensor,
    v: Tensor,
    group: LoraGroup,
    segments: Segments,
    rotation: Rotation,
    config: ExpandConfig | None = None,
) -> None:
    """``elementwise.types.RopeAndWriteKV`` of ``qkv`` with the adapters of ``v`` added: the shrink's for this group."""
    num_heads, norm, cos, sin, k_cache, v_cache, slot_mapping = rotation
    table = table_of(group)
    heads, head_dim = qkv.shape[1:]
    kv_heads = k_cache.shape[2]
    pdl = has_pdl(qkv.get_device())
    q_weight, k_weight, eps = norm or QKNorm(cos, cos, 0.0)  # the former two unread
    strides = (qkv.stride(0), v.stride(1), table.entries.stride(0))
    cache_strides = (*k_cache.stride()[:2], *v_cache.stride()[:2])
    for plan, tiles in plans_of(qkv, group, segments):
        chosen = config or rope_rule(tiles.entries.shape[0], plan.max_rank, qkv.itemsize)
        blocks = math.gcd(chosen.blocks, num_heads, kv_heads)
        constants = {
            "NUM_HEADS": num_heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2, "BLOCK_SIZE": k_cache.shape[1],
            "NORM": norm is not None, "BLOCK_HALF": max(16, triton.next_power_of_2(head_dim // 2)), "BLOCKS": blocks,
            **_shared(plan, tiles, chosen, pdl),
        }  # fmt: skip
        tensors = (
            qkv, v, tiles.entries, table.entries, q_weight, k_weight, cos, sin, k_cache, v_cache, slot_mapping,
        )  # fmt: skip
        launch_rope(
            (*constants.values(), qkv.dtype, k_cache.dtype, qkv.get_device(), *strides, *cache_strides),
            tiles.entries.shape[0] * heads // blocks, tensors,
            (eps, v.shape[1], *strides, plan.config[0].programs, *cache_strides), partial(_options, constants, pdl),
        )  # fmt: skip


def _shared(plan: Plan, tiles: RowTiles, config: ExpandConfig, pdl: bool) -> dict[str, Any]:
    """What both kernels have to know of the adapters and of the shrink."""
    shrink = plan.config[0]
    return {
        "SLICE_COLUMNS": slice_columns(plan.max_rank), "MAX_RANK": plan.max_rank, "BLOCK_M": tiles.block_m,
        "BLOCK_R": config.block_r, "SPLIT_K": shrink.split_k, "SHRINK_R": shrink.block_r,
        "STAGES": config.num_stages, "PDL": pdl, "num_warps": config.num_warps,
    }  # fmt: skip


def _options(constants: dict[str, Any], pdl: bool) -> dict[str, Any]:
    return constants | ({"launch_pdl": True} if pdl else {})
