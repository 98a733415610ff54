"""The paged KV cache: blocks outermost, so that rows come and go freely (Punica paper, section 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

# Another process may take memory between the count and the allocation.
_TRIES = 6
_SMALLER = 0.9


class KVCache:
    """``layers[i]``: layer i's (keys, values), each [num_blocks + 1, block_size, num_kv_heads, head_dim].

    A pool a layer (not one for all): the decode kernel reads it 6 % faster. A block's number means the same in every
    layer. ``num_kv_heads`` are this device's own, which may be a share of the model's.

    ``num_blocks`` are the scheduler's; one more, ``scratch_block``, is nobody's: rows that only fill up a step's fixed
    shape write there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
        # Not zeroed: no backend lets a slot that holds nothing of a sequence into a result, and on a CPU touching every
        # page of a pool that a job may never fill takes seconds of its start.
        self.layers: list[tuple[Tensor, Tensor]] = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pair in self.layers for t in pair)


def allocate_kv_cache(
    *,
    num_layers: int,
    num_blocks: int,
    min_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache | None:
    """A cache of ``num_blocks``, else of a tenth fewer, and so on a few times; None where ``min_blocks`` do not fit."""
    for _ in range(_TRIES):
        try:
            return KVCache(
                num_layers=num_layers, num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads,
                head_dim=head_dim, dtype=dtype, device=device,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            if num_blocks == min_blocks:
                return None
            num_blocks = max(min_blocks, int(num_blocks * _SMALLER))
        torch.cuda.empty_cache()  # the layers that did fit
    return None
