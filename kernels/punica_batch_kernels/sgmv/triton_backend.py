"""SGMV in Triton: a shrink and an expand launch for a group and kernel family, whatever mix of adapters and ranks.

The same functions as ``reference``. They need ``segments.tiles`` and ``group.table``, whose values are read on the
device alone: a launch depends on the tensors' shapes only, so a captured graph serves any segments and adapters.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from punica_batch_kernels.sgmv.tiles import RowTiles
from punica_batch_kernels.sgmv.triton_config import ExpandConfig, ShrinkConfig, choose_config, rank_block
from punica_batch_kernels.sgmv.triton_kernels import expand_kernel, shrink_kernel
from punica_batch_kernels.sgmv.types import MAX_SLICES, LoraGroup, Segments, SlotTable


def add_lora(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments, buffer: Tensor | None = None) -> None:
    """y += (x A.T) B.T. ``buffer`` holds v where given, as ``sgmv_shrink`` takes it; else it is ``empty_v``'s."""
    if _tiles(segments):
        v = empty_v(x, group, segments) if buffer is None else buffer
        sgmv_shrink(v, x, group, segments)
        sgmv_expand(y, v, group, segments)


def empty_v(x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
    """A v for partial sums, float32 [split, T, columns]: K is split where that pays."""
    split_k = max((_configure(group, tiles)[0].split_k for tiles in _tiles(segments)), default=1)
    columns = _slice_columns(group) * len(group.out_widths)
    return torch.empty(split_k, x.shape[0], columns, dtype=torch.float32, device=x.device)


def sgmv_shrink(v: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> None:
    """v[rows, :rank sum] = x[rows] @ A.T for each segment whose slot holds weights of this group (Punica, section 4).

    ``x`` [T, in_features]. ``v`` is ``empty_v``'s, or [T, at least ``group.max_rank_sum``] as the reference takes it;
    both may be strided by row. Columns beyond a row's own ranks, and rows without an adapter, keep what they held.
    Raises ``ValueError`` for an x that does not fit, and for groups without a table or segments without tiles.
    """
    _check_operand(x, _table(group), group.in_features)
    for tiles in _tiles(segments):
        _shrink(v, x, group, tiles, _configure(group, tiles)[0])


def sgmv_expand(y: Tensor, v: Tensor, group: LoraGroup, segments: Segments) -> None:
    """y[rows, slice] += v[rows, slice's ranks] @ B.T for each segment and slice; other rows are left alone.

    ``y`` [T, out_offsets[-1]], may be strided by row; ``v`` as ``sgmv_shrink`` left it. Partial sums are added in a
    fixed order. Raises ``ValueError`` as ``sgmv_shrink`` does.
    """
    _check_operand(y, _table(group), group.out_offsets[-1])
    for tiles in _tiles(segments):
        shrink, expand = _configure(group, tiles)
        _expand(y, v, group, tiles, shrink.split_k, expand)


def _shrink(v: Tensor, x: Tensor, group: LoraGroup, tiles: RowTiles, config: ShrinkConfig) -> None:
    split_k = config.split_k if v.dim() == 3 else 1
    table = _table(group)
    pdl = _has_pdl(x.device)
    shrink_kernel[(tiles.entries.shape[0] * split_k * config.rank_programs,)](
        v,
        x,
        tiles.entries,
        table.entries,
        v.stride(0),
        v.stride(-2),
        x.stride(0),
        table.entries.stride(0),
        split_k,
        config.rank_programs,
        K=group.in_features,
        NUM_SLICES=len(group.out_widths),
        SLICE_COLUMNS=_slice_columns(group) if v.dim() == 3 else 0,
        BLOCK_M=tiles.block_m,
        BLOCK_R=config.block_r,
        BLOCK_K=config.block_k,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )


def _expand(y: Tensor, v: Tensor, group: LoraGroup, tiles: RowTiles, split_k: int, config: ExpandConfig) -> None:
    table = _table(group)
    pdl = _has_pdl(y.device)
    widths = group.out_widths
    spans = sum(-(-width // (config.block_n * config.blocks)) for width in widths)
    width_0, width_1, width_2 = widths + [0] * (MAX_SLICES - len(widths))
    expand_kernel[(tiles.entries.shape[0] * spans,)](
        y,
        v,
        tiles.entries,
        table.entries,
        v.stride(0),
        v.stride(-2),
        y.stride(0),
        table.entries.stride(0),
        WIDTH_0=width_0,
        WIDTH_1=width_1,
        WIDTH_2=width_2,
        WIDTH_DIVISOR=math.gcd(16, *widths),
        SLICE_COLUMNS=_slice_columns(group) if v.dim() == 3 else 0,
        MAX_RANK=table.max_rank,
        BLOCK_M=tiles.block_m,
        BLOCK_R=config.block_r,
        BLOCK_N=config.block_n,
        BLOCKS=config.blocks,
        SPLIT_K=split_k if v.dim() == 3 else 1,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )


def _configure(group: LoraGroup, tiles: RowTiles) -> tuple[ShrinkConfig, ExpandConfig]:
    table = _table(group)
    return choose_config(
        tiles.block_m,
        tiles.entries.shape[0],
        group.in_features,
        len(group.out_widths),
        table.max_rank,
        table.dtype.itemsize,
    )


def _tiles(segments: Segments) -> tuple[RowTiles, ...]:
    """Those of the families that have any rows with adapters."""
    if segments.tiles is None:
        raise ValueError("segments were built without tiles: build them on the CUDA device, or give them RowTiles")
    return tuple(tiles for tiles in segments.tiles if tiles.entries.shape[0])


def _table(group: LoraGroup) -> SlotTable:
    if group.table is None:
        raise ValueError("the LoRA group has no slot table: make SlotTables over the model's groups first")
    return group.table


def _slice_columns(group: LoraGroup) -> int:
    """Columns of a slice in partial sums: whole blocks, so that the expand need not mask them one by one."""
    max_rank = _table(group).max_rank
    block = rank_block(max_rank)
    return -(-max_rank // block) * block


def _check_operand(t: Tensor, table: SlotTable, features: int) -> None:
    if t.dtype != table.dtype or t.shape[1] != features or t.stride(1) != 1:
        raise ValueError(
            f"expected {features} adjacent {table.dtype} columns, got {t.dtype} {tuple(t.shape)} strided {t.stride()}"
        )


@cache
def _has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
