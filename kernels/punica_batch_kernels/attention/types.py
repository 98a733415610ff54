"""What the paged-attention kernels are given, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model's attention always is, for backends that prepare for it. ``windows``: those that its layers use;
    ``max_num_seqs``: decodes of the largest step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: frozenset[int | None] = frozenset({None})
    max_num_seqs: int = 1024


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step's rows, sequence by sequence; prefill sequences first, decode sequences (one row each) last.

    With S sequences and T rows:

    - ``slot_mapping`` int64 [T], on the device: where row t's key and value go, ``block * block_size + offset``;
    - ``qo_indptr`` int32 [S + 1], on the host: the rows of sequence s are ``qo_indptr[s] : qo_indptr[s + 1]``;
    - ``kv_lens`` int32 [S], on the host: keys visible to the sequence's last row, this step's own included;
    - ``block_tables`` int32 [S, max blocks], on the host: block ids in order, unused entries 0;
    - ``num_prefills``: sequences before the first decode; ``num_prefill_tokens``: their rows;
    - ``capacity``: None, or the step's shape (prefill sequences and rows, decode sequences) recurs, in a graph that
      is captured once and replayed after each plan; then no such step has more blocks in its tables than this.
    """

    slot_mapping: Tensor
    qo_indptr: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    num_prefills: int
    num_prefill_tokens: int
    capacity: int | None = None
