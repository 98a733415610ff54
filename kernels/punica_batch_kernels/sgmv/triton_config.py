"""How the Triton kernels are cut for a launch: from a measured table (``tuned``), and by a rule where it is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, tile_bucket
from punica_batch_kernels.sgmv.tuned import TableKey, read_table

# Programs of a shrink: multiples of an H200's 132 multiprocessors (never tried on an A100, with 108).
_SHRINK_PROGRAMS = {PER_ROW: 1056, GROUPED: 264, PREFILL: 396}
# Tiles that an expand has programs for. Where there is room for more, which few steps need, they take them in turn.
# Tall tiles fill their grid, and there is no more room than they need.
MAX_EXPAND_TILES = {PER_ROW: 256, GROUPED: 32}
_MAX_SPLIT = {PER_ROW: 8, GROUPED: 8, PREFILL: 4}
# Adapters of higher rank are few in most jobs, and have their blocks of ranks to share out in place of K.
_COMMON_RANK = 16
# The most ranks that a program of tall tiles holds at a time, and from how many such tiles on its programs are long.
_MAX_TALL_R, _MANY_TALL = 64, 64
# From so many on, nearly one a multiprocessor, a shrink of several slices has no use for more programs.
_MANY_TALL_SHRINK = 128


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """A program sums ``block_r`` ranks at a time over its share of K, ``block_k`` at a time.

    ``programs`` in all, no fewer than tiles, are shared out among the tiles in use; ``split_k`` (a power of two): how
    many of a tile's share K at most, each writing a partial sum. ``num_stages``: loads under way at a time.
    """

    block_r: int
    block_k: int
    split_k: int
    programs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """A program adds ``blocks`` times ``block_n`` columns of y, summing over ``block_r`` ranks at a time.

    ``num_stages``: loads under way at a time of the ranks beyond the first ``block_r``; of tall tiles, where the
    columns' blocks are a loop, of those. Of the rotation a block is a head, and ``blocks`` the most of a program.
    """

    block_r: int
    block_n: int
    blocks: int
    num_warps: int
    num_stages: int


Config = tuple[ShrinkConfig, ExpandConfig]


def choose_config(
    block_m: int,
    num_tiles: int,
    in_features: int,
    widths: tuple[int, ...],
    max_rank: int,
    itemsize: int,
    device: str = "",
) -> Config:
    """For ``num_tiles`` row tiles of ``block_m`` rows and slices of ``widths`` with ranks up to ``max_rank``.

    From the table of ``device`` (as ``tuned.device_name`` says it) where it has an entry, else by the rule.
    """
    key = table_key(block_m, num_tiles, in_features, widths, max_rank, itemsize)
    return load_table(device).get(key) or rule(block_m, num_tiles, in_features, len(widths), max_rank, itemsize)


def table_key(
    block_m: int, num_tiles: int, in_features: int, widths: tuple[int, ...], max_rank: int, itemsize: int
) -> TableKey:
    """Tiles and ranks are looked up by their buckets."""
    return TableKey(block_m, tile_bucket(num_tiles), in_features, widths, max(16, _power_of_2(max_rank)), itemsize)


def rule(block_m: int, num_tiles: int, in_features: int, num_slices: int, max_rank: int, itemsize: int) -> Config:
    """One formula for all shapes and ranks, from what was best on an H200 with a 7B model's shape at rank 16; others
    were not measured one by one.

    Where ``max_rank`` is above 16, an adapter may take several passes: their loads are then under way side by side.
    Blocks keep the size that low ranks want, as those of the highest would take registers from all.
    """
    rank_sum, passes = max_rank * num_slices, max_rank > _COMMON_RANK
    # blocks are sized in bytes: two-byte types get twice the elements that float32 gets
    if block_m == PER_ROW:
        # few rows: more and smaller programs; many: longer loads
        block_r, block_bytes = 16, min(max(16 * _power_of_2(num_tiles), 512), 2048)
        stages = 2048 // block_bytes if passes else 1
        expand = ExpandConfig(16, (512 if passes else 1024) // itemsize, 1, 1, 3)
    elif block_m < PREFILL:
        block_r, block_bytes, stages = 64 if passes else 16, 256, 3
        expand = ExpandConfig(16, 512 // itemsize, 1, 4, 3)
    else:
        block_r, block_bytes, stages = min(max(_power_of_2(rank_sum), 16), 64), 128, 6 if num_slices > 1 else 4
        expand = _tall(num_tiles, max_rank, itemsize)
    block_k = block_bytes // itemsize
    most = num_tiles * _MAX_SPLIT[block_m] * -(-rank_sum // block_r)
    wanted = _SHRINK_PROGRAMS[block_m]
    if block_m == PREFILL and num_tiles >= _MANY_TALL_SHRINK:
        wanted = num_tiles * (1 if num_slices > 1 else 2)
    programs = max(min(wanted, most), num_tiles)
    # rounded down to a power of two: few kernels to compile
    split_k = 1 << (max(1, min(_MAX_SPLIT[block_m], in_features // block_k)).bit_length() - 1)
    return ShrinkConfig(block_r, block_k, split_k, programs, 4, stages), expand


def silu_rule(num_tiles: int, max_rank: int, itemsize: int) -> ExpandConfig:
    """Of ``fused.expand_silu``."""
    expand = _tall(num_tiles, max_rank, itemsize)
    return replace(expand, blocks=min(expand.blocks, 8))


def rope_rule(num_tiles: int, max_rank: int, itemsize: int) -> ExpandConfig:
    """Of ``fused.expand_rope_and_write_kv``, whose blocks are heads."""
    expand = _tall(num_tiles, max_rank, itemsize)
    return replace(expand, blocks=expand.blocks if num_tiles >= _MANY_TALL else 2, num_warps=8)


def _tall(num_tiles: int, max_rank: int, itemsize: int) -> ExpandConfig:
    """Long programs where there are enough of them: what is read before the columns is read less often. All ranks at
    a time where those are not too many, as only then the loop over columns can be pipelined."""
    passes = max_rank > _MAX_TALL_R
    block_r = _COMMON_RANK if passes else max(_power_of_2(max_rank), 16)
    blocks = 16 if num_tiles >= _MANY_TALL else 4
    return ExpandConfig(block_r, 128 // itemsize, blocks, 4 if max_rank <= _COMMON_RANK else 8, 3)


def slice_columns(max_rank: int) -> int:
    """Columns of a slice in partial sums: whole loads of 16 bytes, aligned."""
    return -(-max_rank // 16) * 16


@cache
def load_table(device: str) -> Mapping[TableKey, Config]:
    """The table that the package ships for ``device``; empty where there is none."""
    return {key: (ShrinkConfig(**shrink), ExpandConfig(**expand)) for key, shrink, expand in read_table(device)}


def _power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
