"""How the Triton kernels are cut for a launch: a rule. A measured table can answer before it in ``choose_config``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL

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


@lru_cache(maxsize=4096)
def choose_config(
    block_m: int, num_tiles: int, in_features: int, num_slices: int, max_rank: int, itemsize: int
) -> tuple[ShrinkConfig, ExpandConfig]:
    """For ``num_tiles`` row tiles of ``block_m`` rows and slices of ranks up to ``max_rank``."""
    rank_sum = max_rank * num_slices
    expand_r = rank_block(max_rank)
    # Blocks are sized in bytes: two-byte types get twice the elements that float32 gets. The numbers were measured on
    # an H200 with a 7B model's shape at rank 16.
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


def _power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
