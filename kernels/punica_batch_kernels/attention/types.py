"""What the paged-attention kernels are given, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's rows, sequence by sequence; prefill sequences first, decode sequences (one row each) last.

    With S sequences and T rows:

    - ``qo_indptr`` int32 [S + 1]: the rows of sequence s are ``qo_indptr[s] : qo_indptr[s + 1]``;
    - ``kv_lens`` int32 [S]: keys visible to the sequence's last row, this step's own included;
    - ``block_tables`` int32 [S, max blocks]: block ids in order, unused entries 0;
    - ``slot_mapping`` int64 [T]: where row t's key and value go, ``block * block_size + offset``;
    - ``num_prefills``: sequences before the first decode; ``num_prefill_tokens``: their rows;
    - ``window``: keys further back than this many positions are not seen (None: all are).

    ``*_host`` mirror the numbers for backends that loop on the host.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    num_prefills: int
    num_prefill_tokens: int
    qo_indptr_host: tuple[int, ...]
    kv_lens_host: tuple[int, ...]
