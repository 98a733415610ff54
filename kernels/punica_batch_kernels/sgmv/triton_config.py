"""How the Triton kernels are cut for a launch: from a measured table (``tuned``), and by a rule where it is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, tile_bucket
from punica_batch_kernels.sgmv.tuned import TableKey, read_table

# Programs that keep an A100's or an H200's multiprocessors (108, 132) busy.
_PROGRAMS = {PER_ROW: 1056, GROUPED: 264, PREFILL: 132}
_MAX_SPLIT = 8
_MAX_RANK_PROGRAMS = 4


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """A program sums ``block_r`` ranks at a time over its share of K, ``block_k`` at a time.

    ``split_k`` programs (a power of two) share K, each writing a partial sum; ``rank_programs`` share the ranks.
    """

    block_r: int
    block_k: int
    split_k: int
    rank_programs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """A program adds ``blocks`` times ``block_n`` columns of y, summing over ``block_r`` ranks at a time."""

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
    """What was best on an H200 with a 7B model's shape at rank 16, by one formula for all shapes and ranks."""
    rank_sum = max_rank * num_slices
    expand_r = rank_block(max_rank)
    # blocks are sized in bytes: two-byte types get twice the elements that float32 gets
    if block_m == PER_ROW:
        # few rows: more and smaller programs; many: longer loads
        block_r, block_bytes, stages = 16, min(max(16 * _power_of_2(num_tiles), 512), 2048), 1
        expand = ExpandConfig(16, 1024 // itemsize, 1, 1, 1)
    elif block_m < PREFILL:
        block_r, block_bytes, stages = 16, 256, 3
        expand = ExpandConfig(expand_r, 512 // itemsize, 1, 4, 1)
    else:
        block_r, block_bytes, stages = min(max(_power_of_2(rank_sum), 16), 64), 256, 3
        expand = ExpandConfig(expand_r, 256 // itemsize, 2, 4, 1)
    block_k = block_bytes // itemsize
    rank_programs = min(-(-rank_sum // block_r), _MAX_RANK_PROGRAMS)
    share = _PROGRAMS[block_m] // max(1, num_tiles * rank_programs)
    # rounded down to a power of two: few kernels to compile
    split_k = 1 << (max(1, min(share, _MAX_SPLIT, in_features // block_k)).bit_length() - 1)
    return ShrinkConfig(block_r, block_k, split_k, rank_programs, 4, stages), expand


def rank_block(max_rank: int) -> int:
    """Ranks that the expand takes at a time at most; a slice's columns in v are a multiple of it."""
    return min(max(_power_of_2(max_rank), 16), 64)


def slice_columns(max_rank: int) -> int:
    """Columns of a slice in partial sums: whole blocks, so that the expand need not mask them one by one."""
    block = rank_block(max_rank)
    return -(-max_rank // block) * block


@cache
def load_table(device: str) -> Mapping[TableKey, Config]:
    """The table that the package ships for ``device``; empty where there is none."""
    return {key: (ShrinkConfig(**shrink), ExpandConfig(**expand)) for key, shrink, expand in read_table(device)}


def _power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
