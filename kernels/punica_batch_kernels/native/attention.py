"""Paged attention in C (``csrc/attention.c``) for float32 on a CPU: decode rows and short prompts.

Longer prompts' products are large enough for ``scaled_dot_product_attention``: they go to ``attention.reference``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from punica_batch_kernels.attention import reference
from punica_batch_kernels.attention.reference import AttentionPlan
from punica_batch_kernels.attention.types import AttentionMetadata
from punica_batch_kernels.native.build import Library

# Prefill rows that attend to no more keys than these are computed here, the others by the reference.
SHORT_KEYS = 128
_SPAN_ROWS = 16


@dataclass(frozen=True, slots=True)
class NativePlan:
    """``spans`` int32 [spans, 4]: the C struct ``span``, the most work first. ``rest``: the reference's plan for the
    other sequences (None: there are none)."""

    spans: NDArray[np.int32]
    spans_address: int
    tables: NDArray[np.int32]
    tables_address: int
    rest: AttentionPlan | None


class NativeAttention:
    """``plan`` and ``run`` mean what ``plan_attention`` and ``paged_attention`` of ``attention.reference`` do.

    A row's result depends on its own query, keys and values alone; its sums are in one order on any number of threads.
    """

    def __init__(self, library: Library) -> None:
        self._threads = library.threads
        self._kernel = library.function("paged_attention", "plpppplpllllllf")

    def plan(self, meta: AttentionMetadata, block_size: int, *, window: int | None) -> NativePlan:
        starts = np.asarray(meta.qo_indptr, dtype=np.int64)
        q_lens: NDArray[np.int64] = np.diff(starts)
        kv_lens = np.asarray(meta.kv_lens, dtype=np.int64)
        here = (q_lens == 1) | (kv_lens <= SHORT_KEYS)
        rest = None
        if not here.all():
            rest = reference.plan_attention(meta, block_size, window=window, sequences=np.flatnonzero(~here))
        spans = _spans(starts, q_lens, kv_lens, np.flatnonzero(here))
        tables = np.ascontiguousarray(meta.block_tables)
        return NativePlan(spans, spans.ctypes.data, tables, tables.ctypes.data, rest)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        plan: NativePlan | None = None,
    ) -> Tensor:
        """Float32 throughout, the caches contiguous."""
        if plan is None:
            plan = self.plan(meta, k_cache.shape[1], window=window)
        heads, head_dim = q.shape[1:]
        if q.stride(2) != 1 or q.stride(1) != head_dim:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        if len(plan.spans):
            self._kernel(
                q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
                plan.tables_address, plan.tables.shape[1], plan.spans_address, len(plan.spans),
                k_cache.shape[1], heads, k_cache.shape[2], head_dim, window or 0, scale, *self._threads(),
            )  # fmt: skip
        if plan.rest is not None:
            reference.run_plan(plan.rest, q, k_cache, v_cache, out, scale)
        return out


def _spans(
    starts: NDArray[np.int64], q_lens: NDArray[np.int64], kv_lens: NDArray[np.int64], members: NDArray[np.int64]
) -> NDArray[np.int32]:
    """int32 [spans, 4]: first row, rows, keys that the first row sees, sequence."""
    counts = -(-q_lens[members] // _SPAN_ROWS)
    sequence = np.repeat(members, counts)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * _SPAN_ROWS
    rows = np.minimum(q_lens[sequence] - first, _SPAN_ROWS)
    keys = kv_lens[sequence] - q_lens[sequence] + first + 1
    order = np.argsort(-rows * keys, kind="stable")
    return np.stack([starts[sequence] + first, rows, keys, sequence], axis=1)[order].astype(np.int32)
