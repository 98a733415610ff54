"""SGMV in Triton: a shrink and an expand launch for a group and kernel family, whatever mix of adapters and ranks.

The same functions as ``reference``. They need ``segments.tiles`` and ``group.table``, whose values are read on the
device alone: a launch depends on the tensors' shapes only, so a captured graph serves any segments and adapters.

``config``, where it is given, is used in place of ``choose_config``'s choice, for every family: measurements try
others. ``dependent``: whether a launch may be one dependent on its stream's previous kernel, where the device can.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from punica_batch_kernels.launch import Launcher, has_pdl
from punica_batch_kernels.sgmv.tiles import RowTiles
from punica_batch_kernels.sgmv.triton_config import MAX_EXPAND_TILES, Config, choose_config, slice_columns
from punica_batch_kernels.sgmv.triton_expand import expand_kernel
from punica_batch_kernels.sgmv.triton_shrink import shrink_kernel
from punica_batch_kernels.sgmv.tuned import device_name
from punica_batch_kernels.sgmv.types import MAX_SLICES, LoraGroup, Segments, SlotTable

launch_shrink, launch_expand = Launcher(shrink_kernel), Launcher(expand_kernel)


def add_lora(
    y: Tensor,
    x: Tensor,
    group: LoraGroup,
    segments: Segments,
    buffer: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """y += (x A.T) B.T. ``buffer`` holds v where given, as ``sgmv_shrink`` takes it; else it is ``empty_v``'s."""
    table = table_of(group)
    _check_operand(x, table, group.in_features)
    _check_operand(y, table, group.out_offsets[-1])
    plans = plans_of(x, group, segments, config)
    if plans:
        v = _empty_v(x, [plan for plan, _ in plans]) if buffer is None else buffer
        for plan, tiles in plans:
            plan.shrink(v, x, tiles, table.entries, True)
        for plan, tiles in plans:
            plan.expand(y, v, tiles, table.entries, True)


def has_tiles(segments: Segments) -> bool:
    """Whether the step has any rows with adapters, or room for them. Raises ``ValueError`` as ``sgmv_shrink`` does."""
    return bool(_tiles(segments))


def empty_v(x: Tensor, group: LoraGroup, segments: Segments, config: Config | None = None) -> Tensor:
    """A v for partial sums, float32 [split, T, columns]: K is split where that pays. Needs rows with adapters."""
    return _empty_v(x, [plan for plan, _ in plans_of(x, group, segments, config)])


def sgmv_shrink(
    v: Tensor,
    x: Tensor,
    group: LoraGroup,
    segments: Segments,
    config: Config | None = None,
    *,
    dependent: bool = True,
) -> None:
    """v[rows, :rank sum] = x[rows] @ A.T for each segment whose slot holds weights of this group (Punica, section 4).

    ``x`` [T, in_features]. ``v`` is ``empty_v``'s, or [T, at least ``group.max_rank_sum``] as the reference takes it;
    x and a v of two dimensions may be strided by row. Columns beyond a row's own ranks, and rows without an adapter,
    keep what they held.
    Raises ``ValueError`` for an x that does not fit, and for groups without a table or segments without tiles.
    """
    table = table_of(group)
    _check_operand(x, table, group.in_features)
    for plan, tiles in plans_of(x, group, segments, config):
        plan.shrink(v, x, tiles, table.entries, dependent)


def sgmv_expand(
    y: Tensor,
    v: Tensor,
    group: LoraGroup,
    segments: Segments,
    config: Config | None = None,
    *,
    dependent: bool = True,
) -> None:
    """y[rows, slice] += v[rows, slice's ranks] @ B.T for each segment and slice; other rows are left alone.

    ``y`` [T, out_offsets[-1]], may be strided by row; ``v`` as ``sgmv_shrink`` left it. Partial sums are added in a
    fixed order. Raises ``ValueError`` as ``sgmv_shrink`` does.
    """
    table = table_of(group)
    _check_operand(y, table, group.out_offsets[-1])
    for plan, tiles in plans_of(y, group, segments, config):
        plan.expand(y, v, tiles, table.entries, dependent)


class Plan:
    """A group shape's launches for a number of tiles, worked out once.

    Launch keys begin with a number that stands for all that a plan fixes at compile time, whatever the tiles' number.
    """

    _numbers: ClassVar[dict[Hashable, int]] = {}

    def __init__(
        self, config: Config, in_features: int, widths: tuple[int, ...], block_m: int, num_tiles: int, max_rank: int
    ) -> None:
        self.config = config
        self.in_features, self.widths, self.block_m, self.max_rank = in_features, widths, block_m, max_rank
        self.v_columns = slice_columns(max_rank) * len(widths)
        shrink, expand = config
        spans = sum(-(-width // (expand.block_n * expand.blocks)) for width in widths)
        most = MAX_EXPAND_TILES.get(block_m, num_tiles)
        self.in_turn = num_tiles > most
        self.expand_programs = min(num_tiles, most) * spans
        fixed = (replace(shrink, programs=0), expand, in_features, widths, block_m, max_rank, self.in_turn)
        self.number = self._numbers.setdefault(fixed, len(self._numbers))

    def shrink(self, v: Tensor, x: Tensor, tiles: RowTiles, table: Tensor, dependent: bool) -> None:
        config, parts = self.config[0], v.dim() == 3
        row_stride, x_stride, table_stride, device = v.stride(-2), x.stride(0), table.stride(0), x.get_device()
        pdl = dependent and has_pdl(device)
        launch_shrink(
            (self.number, parts, pdl, x.dtype, v.dtype, device, row_stride, x_stride, table_stride),
            config.programs,
            (v, x, tiles.entries, table),
            (v.shape[-2], row_stride, x_stride, table_stride, config.split_k if parts else 1, config.programs),
            lambda: self._shrink_options(parts, pdl),
        )

    def expand(self, y: Tensor, v: Tensor, tiles: RowTiles, table: Tensor, dependent: bool) -> None:
        parts = v.dim() == 3
        row_stride, y_stride, table_stride, device = v.stride(-2), y.stride(0), table.stride(0), y.get_device()
        pdl = dependent and has_pdl(device)
        launch_expand(
            (self.number, parts, pdl, y.dtype, v.dtype, device, row_stride, y_stride, table_stride),
            self.expand_programs,
            (y, v, tiles.entries, table),
            (v.shape[-2], row_stride, y_stride, table_stride, self.config[0].programs),
            lambda: self._expand_options(parts, pdl),
        )

    def _shrink_options(self, parts: bool, pdl: bool) -> dict[str, Any]:
        config = self.config[0]
        return {
            "K": self.in_features,
            "NUM_SLICES": len(self.widths),
            "SLICE_COLUMNS": slice_columns(self.max_rank) if parts else 0,
            "BLOCK_M": self.block_m,
            "BLOCK_R": config.block_r,
            "BLOCK_K": config.block_k,
            "STAGES": config.num_stages,
            "PDL": pdl,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **({"launch_pdl": True} if pdl else {}),
        }

    def _expand_options(self, parts: bool, pdl: bool) -> dict[str, Any]:
        shrink, config = self.config
        padded = (*self.widths, *(0,) * (MAX_SLICES - len(self.widths)))
        return {
            **{f"WIDTH_{i}": width for i, width in enumerate(padded)},
            "WIDTH_DIVISOR": math.gcd(16, *self.widths),
            "SLICE_COLUMNS": slice_columns(self.max_rank) if parts else 0,
            "MAX_RANK": self.max_rank,
            "BLOCK_M": self.block_m,
            "BLOCK_R": config.block_r,
            "BLOCK_N": config.block_n,
            "BLOCKS": config.blocks,
            "SPLIT_K": shrink.split_k if parts else 1,
            "SHRINK_R": shrink.block_r,
            "STAGES": config.num_stages,
            "IN_TURN": self.in_turn,
            "PDL": pdl,
            "num_warps": config.num_warps,
            "num_stages": 1,  # of the loop over what is left to a program, which holds that of the ranks
            **({"launch_pdl": True} if pdl else {}),
        }


def _empty_v(x: Tensor, plans: Sequence[Plan]) -> Tensor:
    split_k = max(plan.config[0].split_k for plan in plans)
    return torch.empty(split_k, x.shape[0], plans[0].v_columns, dtype=torch.float32, device=x.device)


def plans_of(
    like: Tensor, group: LoraGroup, segments: Segments, config: Config | None = None
) -> list[tuple[Plan, RowTiles]]:
    """Of each family that has any rows with adapters, on the device of ``like``."""
    table = table_of(group)
    fixed = (group.in_features, group.out_offsets, table.max_rank, table.dtype.itemsize, like.device, config)
    return [(_cached_plan(t.block_m, t.entries.shape[0], *fixed), t) for t in _tiles(segments)]


@lru_cache(maxsize=4096)
def _cached_plan(
    block_m: int,
    num_tiles: int,
    in_features: int,
    out_offsets: tuple[int, ...],
    max_rank: int,
    itemsize: int,
    device: torch.device,
    config: Config | None,
) -> Plan:
    widths = tuple(stop - start for start, stop in pairwise(out_offsets))
    if config is None:
        name = device_name(device)
        config = choose_config(block_m, num_tiles, in_features, widths, max_rank, itemsize, name)
    return Plan(config, in_features, widths, block_m, num_tiles, max_rank)


def _tiles(segments: Segments) -> tuple[RowTiles, ...]:
    """One a family that has any rows with adapters."""
    if segments.tiles is None:
        raise ValueError("segments were built without tiles: build them on the CUDA device, or give them RowTiles")
    return segments.tiles


def table_of(group: LoraGroup) -> SlotTable:
    if group.table is None:
        raise ValueError("the LoRA group has no slot table: make SlotTables over the model's groups first")
    return group.table


def _check_operand(t: Tensor, table: SlotTable, features: int) -> None:
    if t.dtype != table.dtype or t.shape[1] != features or t.stride(1) != 1:
        raise ValueError(
            f"expected {features} adjacent {table.dtype} columns, got {t.dtype} {tuple(t.shape)} strided {t.stride()}"
        )
