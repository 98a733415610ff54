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


# By [out, in] of a weight and ``row_bucket``: what was best on an H200 in float16; None where cuBLAS was.
MEASURED: dict[tuple[int, int], dict[int, FewRowsConfig | None]] = {}


def row_bucket(rows: int) -> int:
    """Rows of a program's tile, which tensor cores have 16 of at least."""
    return max(16, 1 << (rows - 1).bit_length())


def choose_config(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> FewRowsConfig | None:
    """None: cuBLAS is faster, or nothing was measured on a GPU like ``device``."""
    if dtype.itemsize != 2 or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return MEASURED.get((out_features, in_features), {}).get(row_bucket(rows))
