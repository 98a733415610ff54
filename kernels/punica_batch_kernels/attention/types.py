"""What the paged-attention kernels are given, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model's attention always is, for backends that prepare for it. ``windows``: those that its layers use."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: frozenset[int | None] = frozenset({None})


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's rows, sequence by sequence; prefill sequences first, decode sequences (one row each) last.

    With S sequences and T rows:

    - ``qo_indptr`` int32 [S + 1]: the rows of sequence s are ``qo_indptr[s] : qo_indptr[s + 1]``;
    - ``kv_lens`` int32 [S]: keys visible to the sequence's last row, this step's own included;
    - ``block_tables`` int32 [S, max blocks]: block ids in order, unused entries 0;
    - ``slot_mapping`` int64 [T]: where row t's key and value go, ``block * block_size + offset``;
    - ``num_prefills``: sequences before the first decode; ``num_prefill_tokens``: their rows.

    ``*_host`` mirror the numbers for backends that plan on the host.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    num_prefills: int
    num_prefill_tokens: int
    qo_indptr_host: tuple[int, ...]
    kv_lens_host: tuple[int, ...]
    block_tables_host: NDArray[np.int32]
