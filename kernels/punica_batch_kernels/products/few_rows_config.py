"""Which of its launches ``few_rows`` takes for a product, and for which it leaves the product to cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Beyond, products are more than a reading of their weights.
MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """A program sums ``block_k`` of K at a time for ``block_n`` columns of the output.

    ``programs``: as many share all there is to read evenly; 0: each tile of the output has ``split_k`` of its own.
    ``transposed``: the weights take that side of the tensor cores' tiles that is no less than 64. ``num_stages``: loads
    under way at a time. ``prefetch``: bytes of each row of a program's first weights, a power of two, that are brought
    to the cache while the kernel before still runs.
    """

    block_n: int
    block_k: int
    transposed: bool
    num_warps: int
    num_stages: int
    split_k: int = 1
    programs: int = 0
    prefetch: int = 0


# Of an H200 and an H100: tiles that fill these evenly fill no other number so.
_MULTIPROCESSORS = 132
_PREFETCH = 512


def _config(
    block_n: int, block_k: int, num_stages: int, *, num_warps: int = 4, transposed: bool = True, split_k: int = 1
) -> FewRowsConfig:
    return FewRowsConfig(block_n, block_k, transposed, num_warps, num_stages, split_k, prefetch=_PREFETCH)


# 4,096 columns are too few tiles of 64: two programs share each.
_OF_4096: dict[int, FewRowsConfig | None] = {
    16: _config(64, 256, 4, split_k=2), 32: _config(64, 256, 4, split_k=2), 64: _config(32, 256, 4, transposed=False),
}  # fmt: skip
# By [out, in] of a weight and ``row_bucket``: what was best on an H200 in float16; None where cuBLAS was. How evenly
# tiles fill the multiprocessors decides, so there is no rule for others.
MEASURED: dict[tuple[int, int], dict[int, FewRowsConfig | None]] = {
    (4096, 4096): _OF_4096,
    (4096, 11008): _OF_4096,
    (12288, 4096): {16: _config(128, 128, 4), 32: _config(128, 128, 4), 64: _config(128, 128, 4, num_warps=8)},
    (22016, 4096): {16: _config(64, 128, 6), 32: _config(64, 128, 3), 64: None},
    (32000, 4096): {16: _config(128, 128, 3, num_warps=8), 32: _config(128, 64, 4), 64: _config(128, 64, 4)},
}


def row_bucket(rows: int) -> int:
    """Rows of a program's tile, which tensor cores have 16 of at least."""
    return max(16, 1 << (rows - 1).bit_length())


def choose_config(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> FewRowsConfig | None:
    """None: cuBLAS is faster, or nothing was measured on a GPU like ``device``."""
    if dtype.itemsize != 2 or device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    if about.major != 9 or about.multi_processor_count != _MULTIPROCESSORS:
        return None
    return MEASURED.get((out_features, in_features), {}).get(row_bucket(rows))
