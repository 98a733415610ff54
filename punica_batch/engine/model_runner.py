"""One step on the device: index arrays in, token ids out.

``execute`` enqueues and ``collect`` waits, so that a caller may plan step t+1 while step t runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from punica_batch_kernels.attention.types import AttentionMetadata
from punica_batch_kernels.sgmv.types import Segments
from torch import Tensor

from punica_batch.engine.kv_cache import KVCache
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.sampler import SamplerOutput, SamplingBatch, sample
from punica_batch.models.llama import LlamaModel
from punica_batch.scheduler.batch import BatchArrays
from punica_batch.scheduler.sequence import Sequence

_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A step that is enqueued: its outcome is on the device, or will be."""

    sampling: SamplingBatch
    output: SamplerOutput


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's outcome on the host, one entry a sampled sequence. ``finite[i]`` False: its logits were NaN or Inf.

    ``logprobs``: for those that asked, (of the token, [(id, logprob) of the likeliest, at least as many as asked]).
    """

    token_ids: list[int]
    finite: list[bool]
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]]


class ModelRunner:
    """The model with its KV cache and adapters. ``job_seed`` seeds every random stream together with the row."""

    def __init__(self, model: LlamaModel, kv_cache: KVCache, lora_store: LoraStore, job_seed: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._lora_store = lora_store
        self._device = kv_cache.device
        self._job_seed = job_seed

    @torch.inference_mode()
    def execute(self, arrays: BatchArrays) -> PendingStep:
        """Computes the rows' keys and values into the cache and samples one token for each of ``arrays.sampled``."""
        sampling = self._sampling(arrays.sampled)
        # before the forward pass is enqueued: copying them could wait for it
        logits_segments = self._segments(arrays.logits_seg_indptr, arrays.logits_segment_lora_ids)
        (logits_rows,) = self._to_device(arrays.logits_rows)
        rows = self._forward(arrays).index_select(0, logits_rows)
        logits = self.model.logits(rows, logits_segments, self._lora_store.model_lora)
        return PendingStep(sampling, sample(logits, sampling))

    def collect(self, step: PendingStep) -> SampledTokens:
        """Waits for a step and brings its outcome to the host."""
        output = step.output
        logprobs: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        if output.chosen_logprobs is not None and output.top_ids is not None and output.top_logprobs is not None:
            columns = (output.chosen_logprobs.tolist(), output.top_ids.tolist(), output.top_logprobs.tolist())
            for row, chosen, ids, values in zip(step.sampling.logprob_rows.tolist(), *columns, strict=True):
                logprobs[row] = chosen, list(zip(ids, values, strict=True))
        return SampledTokens(output.token_ids.tolist(), output.finite.tolist(), logprobs)

    @torch.inference_mode()
    def forward_logits(self, arrays: BatchArrays) -> Tensor:
        """As ``execute``, but answers the logits of every row, float32 [T, V], and samples nothing."""
        segments = self._segments(arrays.seg_indptr, arrays.segment_lora_ids)
        return self.model.logits(self._forward(arrays), segments, self._lora_store.model_lora)

    def _forward(self, arrays: BatchArrays) -> Tensor:
        """The final hidden states [T, hidden]."""
        segments = self._segments(arrays.seg_indptr, arrays.segment_lora_ids)
        input_ids, positions, slot_mapping, qo_indptr, kv_lens, block_tables = self._to_device(
            arrays.input_ids, arrays.positions, arrays.slot_mapping,
            arrays.qo_indptr, arrays.kv_lens, arrays.block_tables,
        )  # fmt: skip
        meta = AttentionMetadata(
            qo_indptr=qo_indptr,
            kv_lens=kv_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            num_prefills=arrays.num_prefills,
            num_prefill_tokens=arrays.num_prefill_tokens,
            qo_indptr_host=tuple(arrays.qo_indptr.tolist()),
            kv_lens_host=tuple(arrays.kv_lens.tolist()),
            block_tables_host=arrays.block_tables,
        )
        lora = self._lora_store.model_lora
        return self.model.forward(input_ids, positions, meta, self.kv_cache.layers, segments, lora)

    def _segments(self, seg_indptr: list[int], lora_ids: list[str | None]) -> Segments:
        slots = [-1 if lora_id is None else self._lora_store.slot(lora_id) for lora_id in lora_ids]
        return Segments.build(seg_indptr, slots, self._device)

    def _sampling(self, sequences: list[Sequence]) -> SamplingBatch:
        return SamplingBatch.build(
            [s.request.sampling for s in sequences],
            [s.request.row for s in sequences],
            [s.sample for s in sequences],
            [s.num_tokens for s in sequences],
            self._job_seed,
        )

    def _to_device(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """int64 and int32 arrays as tensors on the device: to a GPU in one copy, which nothing waits for."""
        if self._device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        words = [-(-array.nbytes // 8) for array in arrays]
        # from a cache of pinned blocks, which keeps this one until the copy has run
        host = torch.empty(sum(words), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for part, array in zip(host.split_with_sizes(words), arrays, strict=True):
            part.numpy().view(array.dtype)[: array.size] = array.reshape(-1)
        parts = host.to(self._device, non_blocking=True).split_with_sizes(words)
        return [
            part.view(_TORCH_DTYPES[array.dtype])[: array.size].view(array.shape)
            for part, array in zip(parts, arrays, strict=True)
        ]
