"""Paged attention by FlashInfer: a step's prefill rows through one wrapper, its decode rows through another.

Pages are the KV blocks, in the layout NHD that the pools have. FlashInfer compiles its kernels at first use, some tens
of seconds for each dtype, head size and use of windows, and keeps them in its cache folder; that happens when a
``FlashInferAttention`` is made, not in a step.

A plan is host arrays sent to the device without waiting. FlashInfer writes one of them into a pinned buffer of its
own, which the copy of the plan before may still be reading when steps are planned ahead: two take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from punica_batch_kernels.attention.types import AttentionMetadata, AttentionShape

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# The least for the partial results of sequences that are split; one buffer serves all wrappers, as they run in turn.
WORKSPACE_BYTES = 256 << 20
# Rows and sequences of the largest prefill that recurs in a graph.
RECURRING_PREFILL = (256, 18)
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


def workspace_bytes(shape: AttentionShape, num_sms: int) -> int:
    """What the largest step sets aside: in a graph FlashInfer splits always, and counts with whatever a step of the
    graph's shape could be split into, in tiles of float32 rows with a log-sum-exp each (``PrefillPlan`` in its
    scheduler.cuh). Decodes on tensor cores are prefills of one row there."""
    group = shape.num_heads // shape.num_kv_heads
    rows, sequences = RECURRING_PREFILL
    tiles = max(2 * num_sms // shape.num_kv_heads, -(-rows * group // 128) + sequences - 1)
    tile = 16 if group <= 16 else 64 if group <= 64 or shape.head_dim >= 256 else 128
    decode = (-(-shape.max_num_seqs * group // tile) + shape.max_num_seqs - 1) * tile
    return max(WORKSPACE_BYTES, shape.num_heads * max(128 * tiles, decode) * (shape.head_dim + 1) * 4)


def prefill_backend(device: torch.device, dtype: torch.dtype) -> str:
    """FlashInfer's name of the fastest prefill kernels for steps that are planned one by one: Hopper has its own.

    In graphs it is always "fa2", which takes any number of rows that a plan of its shape may bring.
    """
    from flashinfer.utils import PosEncodingMode, determine_attention_backend

    return str(determine_attention_backend(device, PosEncodingMode.NONE.value, False, False, dtype, dtype))


@dataclass(frozen=True, slots=True)
class PageTable:
    """Sequences' pages in a row: those of sequence s are ``indices[indptr[s] : indptr[s + 1]]``, the last of which
    holds ``last_page_len[s]`` keys (1 to the page's size). All int32."""

    indptr: Int32
    indices: Int32
    last_page_len: Int32

    @classmethod
    def build(cls, block_tables: Int32, kv_lens: Int32, block_size: int) -> PageTable:
        """``block_tables`` [S, any number not too small]; ``kv_lens`` [S], each at least 1."""
        counts = -(-kv_lens // block_size)
        indptr = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        used = np.arange(block_tables.shape[1]) < counts[:, None]
        return cls(indptr, block_tables[used], (kv_lens - (counts - 1) * block_size).astype(np.int32))


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """The planned wrappers of a step, None where it has no such rows; the first ``num_prefill_tokens`` rows are
    ``prefill``'s."""

    prefill: Any
    decode: Any
    num_prefill_tokens: int


class _Wrappers:
    """FlashInfer's wrappers of one kind (prefill or decode) and window.

    One serves steps of any shape. Each shape that recurs in a graph has another, which always reads the same buffers.
    As wrappers of a kind are never in the same step, they share the buffer that a plan is sent to.
    """

    def __init__(self, make: Callable[..., Any], device: torch.device) -> None:
        self._make = make
        self._device = device
        self._any = make()
        self._recurring: dict[tuple[int, int], Any] = {}
        self._indices: Tensor | None = None  # of all that recur
        self._on_device = self._any._int_workspace_buffer
        # FlashInfer has no public way to alternate its pinned buffer
        self._pinned = [self._any._pin_memory_int_workspace_buffer, *_pinned_like(self._any)]

    def plan(
        self, pages: PageTable, qo_indptr: Int32 | None, num_rows: int, capacity: int | None, *args: Any, **options: Any
    ) -> Any:
        wrapper = self._any if capacity is None else self._of_shape(len(pages.last_page_len), num_rows, capacity)
        self._pinned.reverse()
        wrapper._pin_memory_int_workspace_buffer = self._pinned[0]
        indices = _to_pinned(pages.indices, self._device)
        if capacity is not None:
            assert self._indices is not None
            self._indices[: len(indices)].copy_(indices, non_blocking=True)
            indices = self._indices[:0]  # already there: FlashInfer's own copy would wait
        rows = () if qo_indptr is None else (_to_pinned(qo_indptr, self._device),)
        table = (_to_pinned(pages.indptr, self._device), indices, _to_pinned(pages.last_page_len, self._device))
        wrapper.plan(*rows, *table, *args, **options)
        return wrapper

    def _of_shape(self, num_sequences: int, num_rows: int, capacity: int) -> Any:
        if self._indices is None or len(self._indices) != capacity:  # the first engine's, or another's after it
            self._indices = torch.empty(capacity, dtype=torch.int32, device=self._device)
            self._recurring.clear()
        key = num_sequences, num_rows
        if key not in self._recurring:
            wrapper = self._recurring[key] = self._make(num_sequences, self._indices)
            wrapper._int_workspace_buffer = self._on_device
        return self._recurring[key]


class FlashInferAttention:
    """``plan`` and ``run`` mean what ``plan_attention`` and ``paged_attention`` of ``attention.reference`` do.

    A wrapper keeps its plan in buffers of its own: a plan is good until the next one with the same window, and the
    last step but one must have ended by then. Raises whatever importing or compiling FlashInfer raises.
    """

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        fastest = prefill_backend(device, dtype)
        size = workspace_bytes(shape, torch.cuda.get_device_properties(device).multi_processor_count)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        try:
            self._wrappers = self._make_wrappers(fastest)
            self._compile()
        except Exception:
            if fastest == "fa2":
                raise
            # a compiler that is too old for Hopper's own kernels may do for the others
            self._wrappers = self._make_wrappers("fa2")
            self._compile()

    def _make_wrappers(self, backend: str) -> dict[int | None, tuple[_Wrappers, _Wrappers]]:
        """By window: those of prefills, by ``backend`` where they are not recorded, and those of decodes."""
        import flashinfer

        def buffer(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=self._device)

        def prefill(num_sequences: int | None = None, indices: Tensor | None = None) -> Any:
            make = partial(flashinfer.BatchPrefillWithPagedKVCacheWrapper, self._workspace, "NHD")
            if num_sequences is None:
                return make(backend=backend)
            n = num_sequences
            return make(
                backend="fa2", use_cuda_graph=True, qo_indptr_buf=buffer(n + 1), paged_kv_indptr_buf=buffer(n + 1),
                paged_kv_indices_buf=indices, paged_kv_last_page_len_buf=buffer(n),
            )  # fmt: skip

        tensor_cores = self._shape.num_heads // self._shape.num_kv_heads >= TENSOR_CORE_GROUP

        def decode(num_sequences: int | None = None, indices: Tensor | None = None) -> Any:
            make = partial(
                flashinfer.BatchDecodeWithPagedKVCacheWrapper, self._workspace, "NHD", use_tensor_cores=tensor_cores
            )
            if num_sequences is None:
                return make()
            n = num_sequences
            return make(
                use_cuda_graph=True, paged_kv_indptr_buffer=buffer(n + 1), paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=buffer(n),
            )  # fmt: skip

        windows = self._shape.windows
        return {w: (_Wrappers(prefill, self._device), _Wrappers(decode, self._device)) for w in windows}

    def plan(self, meta: AttentionMetadata, block_size: int, *, window: int | None) -> FlashInferPlan:
        """Sends the step's page tables to the device; nothing waits for it."""
        prefills, decodes = self._wrappers[window]
        n, shape = meta.num_prefills, self._shape
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size)
        options = {
            "sm_scale": 1.0, "window_left": _window_left(window), "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }  # fmt: skip
        prefill = decode = None
        if n:
            pages = PageTable.build(meta.block_tables[:n], meta.kv_lens[:n], block_size)
            prefill = prefills.plan(
                pages, meta.qo_indptr[: n + 1], meta.num_prefill_tokens, meta.capacity, *heads,
                causal=True, **options,
            )  # fmt: skip
        if n < len(meta.kv_lens):
            pages = PageTable.build(meta.block_tables[n:], meta.kv_lens[n:], block_size)
            decode = decodes.plan(pages, None, len(pages.last_page_len), meta.capacity, *heads, **options)
        return FlashInferPlan(prefill, decode, meta.num_prefill_tokens)

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

    def _compile(self) -> None:
        """A first plan of each kind: of a prompt of two tokens, and of one token."""
        for window in self._wrappers:
            meta = AttentionMetadata(
                torch.zeros(3, dtype=torch.int64, device=self._device), np.array([0, 2, 3], np.int32),
                np.array([2, 1], np.int32), np.zeros((2, 1), np.int32), num_prefills=1, num_prefill_tokens=2,
            )  # fmt: skip
            self.plan(meta, 16, window=window)


def _window_left(window: int | None) -> int:
    """FlashInfer counts the keys before a row's own; -1: all."""
    return -1 if window is None else window - 1


def _pinned_like(wrapper: Any) -> list[Tensor]:
    own = wrapper._pin_memory_int_workspace_buffer
    return [torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_pinned())]


def _to_pinned(array: Int32, device: torch.device) -> Tensor:
    """A copy that can be sent without waiting, in a block of a cache that keeps it until it has been."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor
