"""Paged attention by FlashInfer: a step's prefill rows through one wrapper, its decode rows through another.

Pages are the KV blocks, in the layout NHD that the pools have. FlashInfer compiles its kernels at first use, some tens
of seconds for each dtype, head size and use of windows, and keeps them in its cache folder; that happens when a
``FlashInferAttention`` is made, not in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from punica_batch_kernels.attention.types import AttentionMetadata, AttentionShape

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# For the partial results of sequences that are split; one buffer serves all wrappers, as they run in turn.
WORKSPACE_BYTES = 256 << 20
# From this many query heads a key head on, decode keeps tensor cores busy.
TENSOR_CORE_GROUP = 4

Int32 = NDArray[np.int32]


def unsupported(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why FlashInfer's kernels cannot serve such a model, if they cannot."""
    if dtype not in DTYPES:
        return f"it has no kernels for {str(dtype).removeprefix('torch.')}"
    if kv_dtype != dtype:
        return "the KV cache has another dtype than the model"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has no kernels for heads of size {shape.head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class PageTable:
    """Sequences' pages in a row: those of sequence s are ``indices[indptr[s] : indptr[s + 1]]``, the last of which
    holds ``last_page_len[s]`` keys (1 to the page's size). All int32."""

    indptr: Int32
    indices: Int32
    last_page_len: Int32

    @classmethod
    def build(cls, block_tables: Int32, kv_lens: NDArray[np.int64], block_size: int) -> PageTable:
        """``block_tables`` [S, any number not too small]; ``kv_lens`` [S], each at least 1."""
        counts = -(-kv_lens // block_size)
        indptr = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        used = np.arange(block_tables.shape[1]) < counts[:, None]
        return cls(indptr, block_tables[used], (kv_lens - (counts - 1) * block_size).astype(np.int32))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.from_numpy(self.indptr), torch.from_numpy(self.indices), torch.from_numpy(self.last_page_len)


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """The planned wrappers of a step, None where it has no such rows; the first ``num_prefill_tokens`` rows are
    ``prefill``'s."""

    prefill: Any
    decode: Any
    num_prefill_tokens: int


class FlashInferAttention:
    """``plan`` and ``run`` mean what ``plan_attention`` and ``paged_attention`` of ``attention.reference`` do.

    A wrapper keeps its plan in buffers of its own: a plan is good until the next one with the same window, and the
    step that uses it must have ended by then. Raises whatever importing or compiling FlashInfer raises.
    """

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
        import flashinfer

        self._shape = shape
        self._dtype = dtype
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        tensor_cores = shape.num_heads // shape.num_kv_heads >= TENSOR_CORE_GROUP
        # fa2 and not the default: it serves every GPU since Ampere and compiles in a third of the time
        self._wrappers = {
            window: (
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2"),
                flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores),
            )
            for window in shape.windows
        }
        self._compile()

    def plan(self, meta: AttentionMetadata, block_size: int, *, window: int | None) -> FlashInferPlan:
        """Sends the step's page tables to the device; nothing waits for it."""
        prefill, decode = self._wrappers[window]
        n = meta.num_prefills
        kv_lens = np.asarray(meta.kv_lens_host, dtype=np.int64)
        tables = meta.block_tables_host
        if n:
            qo_indptr = torch.tensor(meta.qo_indptr_host[: n + 1], dtype=torch.int32)
            self._plan_prefill(
                prefill, qo_indptr, PageTable.build(tables[:n], kv_lens[:n], block_size), block_size, window
            )
        if n < len(kv_lens):
            self._plan_decode(decode, PageTable.build(tables[n:], kv_lens[n:], block_size), block_size, window)
        return FlashInferPlan(prefill if n else None, decode if n < len(kv_lens) else None, meta.num_prefill_tokens)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        plan: FlashInferPlan | None = None,
    ) -> Tensor:
        if plan is None:
            plan = self.plan(meta, k_cache.shape[1], window=window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n, cache = plan.num_prefill_tokens, (k_cache, v_cache)
        # planned with a scale of 1: k_scale is one more factor of it, and the one that may come this late
        if plan.prefill is not None:
            plan.prefill.run(q[:n], cache, out=out[:n], k_scale=scale)
        if plan.decode is not None:
            plan.decode.run(q[n:], cache, out=out[n:], k_scale=scale)
        return out

    def _plan_prefill(
        self, wrapper: Any, qo_indptr: Tensor, pages: PageTable, block_size: int, window: int | None
    ) -> None:
        shape = self._shape
        wrapper.plan(
            qo_indptr, *pages.tensors(), shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size,
            causal=True, sm_scale=1.0, window_left=_window_left(window),
            q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    def _plan_decode(self, wrapper: Any, pages: PageTable, block_size: int, window: int | None) -> None:
        shape = self._shape
        wrapper.plan(
            *pages.tensors(), shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size,
            sm_scale=1.0, window_left=_window_left(window), q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    def _compile(self) -> None:
        """A first plan of each kind: of one sequence with one key."""
        pages = PageTable.build(np.zeros((1, 1), np.int32), np.ones(1, np.int64), 16)
        for window, (prefill, decode) in self._wrappers.items():
            self._plan_prefill(prefill, torch.tensor([0, 1], dtype=torch.int32), pages, 16, window)
            self._plan_decode(decode, pages, 16, window)


def _window_left(window: int | None) -> int:
    """FlashInfer counts the keys before a row's own; -1: all."""
    return -1 if window is None else window - 1
