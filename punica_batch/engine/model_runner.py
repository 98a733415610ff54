"""One step on the device: index arrays in, token ids out.

``execute`` enqueues and ``collect`` waits, so that a caller may plan step t+1 while step t runs: sampled ids stay on
the device, where the next step finds them by their sequence's seat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from punica_batch_kernels.attention.types import AttentionMetadata
from punica_batch_kernels.sgmv.tiles import (
    PER_ROW,
    common_families,
    cut_tiles,
    plan_families,
    take_all_rows,
    tile_bucket,
)
from punica_batch_kernels.sgmv.types import Segments
from torch import Tensor

from punica_batch.engine.graphs import GraphKey, StepGraphs
from punica_batch.engine.kv_cache import KVCache
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.lora_warm_up import warm_up_lora
from punica_batch.engine.sampler import SamplerOutput, SamplingBatch, greedy, sample
from punica_batch.engine.sampler import warm_up as warm_up_sampler
from punica_batch.engine.settings import EngineSettings
from punica_batch.engine.step_buffer import StepBuffer, StepInputs, Tiles
from punica_batch.models.llama import KeptRows, LlamaModel
from punica_batch.scheduler.batch import BatchArrays
from punica_batch.scheduler.padding import PREFILL_TOKENS, StepShape, empty_arrays, full_shapes, pad, shape_for
from punica_batch.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's outcome on the host, one entry a sampled sequence. ``finite[i]`` False: its logits were NaN or Inf.

    ``logprobs``: for those that asked, (of the token, [(id, logprob) of the likeliest, at least as many as asked]).
    """

    token_ids: list[int]
    finite: list[bool]
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]]


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A step that is enqueued. ``output``: its outcome on its way to the host, there when ``done``."""

    sampling: SamplingBatch
    output: SamplerOutput
    done: Any


class ModelRunner:
    """The model with its KV cache and adapters. ``settings.seed`` seeds every random stream together with the row.

    ``graphs``: where steps of few prefill rows are filled up to a shape and recorded. None: every step runs as it is.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv_cache: KVCache,
        lora_store: LoraStore,
        settings: EngineSettings,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.graphs = graphs
        self._lora_store = lora_store
        self._settings = settings
        most = max(settings.max_num_batched_tokens, settings.max_num_seqs + PREFILL_TOKENS[-1])
        self._buffer = StepBuffer(settings.max_num_seqs, most, kv_cache.device)

    @torch.inference_mode()
    def execute(self, arrays: BatchArrays) -> PendingStep:
        """Computes the rows' keys and values into the cache and samples one token for each of ``arrays.sampled``."""
        sampling = self._sampling(arrays.sampled)
        logits, inputs = self._logits(arrays)
        output = SamplerOutput(*greedy(logits)) if sampling.greedy_only else sample(logits, sampling)
        self._buffer.last_tokens.index_copy_(0, inputs.seats, output.token_ids)
        return PendingStep(sampling, *_to_host(output))

    def collect(self, step: PendingStep) -> SampledTokens:
        """Waits for a step and brings its outcome to the host."""
        if step.done is not None:
            step.done.synchronize()
        output = step.output
        logprobs: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        if output.chosen_logprobs is not None and output.top_ids is not None and output.top_logprobs is not None:
            columns = (output.chosen_logprobs.tolist(), output.top_ids.tolist(), output.top_logprobs.tolist())
            for row, chosen, ids, values in zip(step.sampling.logprob_rows.tolist(), *columns, strict=True):
                logprobs[row] = chosen, list(zip(ids, values, strict=True))
        return SampledTokens(output.token_ids.tolist(), output.finite.tolist(), logprobs)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles what steps may launch, and records what those of a full batch will be, by steps of nothing."""
        model, settings = self.model, self._settings
        if settings.adapters and model.device.type != "cpu":
            warm_up_lora(model, self._lora_store.model_lora, self.kv_cache, settings.max_num_batched_tokens)
        if self.graphs is None:
            return
        warm_up_sampler(model.config.vocab_size, model.dtype, model.device)
        for shape in full_shapes(settings.max_num_seqs):
            arrays = pad(empty_arrays(), shape, self.kv_cache.scratch_block, self.kv_cache.block_size)
            families = [(), *common_families(shape.num_tokens)] if settings.adapters else [()]
            for family in families:
                self._in_shape(arrays, shape, [(block_m, np.zeros((n, 4), np.int32)) for block_m, n in family])
                torch.cuda.synchronize(model.device)  # plans may be at most one step ahead

    def _logits(self, arrays: BatchArrays) -> tuple[Tensor, StepInputs]:
        """Of ``arrays.logits_rows``, [R, vocab] of the model's dtype; and what the step was sent as."""
        arrays, shape = self._shaped(arrays)
        if shape is None:
            hidden, inputs, segments = self._as_it_is(arrays)
        else:
            hidden, inputs = self._in_shape(arrays, shape)
            hidden, segments = hidden.index_select(0, inputs.logits_rows), None
        return self.model.logits(hidden, segments, self._lora_store.model_lora), inputs

    def _shaped(self, arrays: BatchArrays) -> tuple[BatchArrays, StepShape | None]:
        """The step filled up to a shape, where it is one to be recorded."""
        if self.graphs is None or any(map(self._touches_ends, arrays.segment_lora_ids)):
            return arrays, None
        shape = shape_for(arrays, self._settings.max_num_seqs)
        if shape is None:
            return arrays, None
        return pad(arrays, shape, self.kv_cache.scratch_block, self.kv_cache.block_size), shape

    def _touches_ends(self, lora_id: str | None) -> bool:
        """Whether an adapter adds to the embedding or the head as well, outside what a graph holds."""
        return lora_id is not None and self._lora_store.model_lora.touches_ends(self._lora_store.slot(lora_id))

    def _as_it_is(self, arrays: BatchArrays) -> tuple[Tensor, StepInputs, Segments]:
        """A step's final hidden states [R, hidden], of ``arrays.logits_rows``; what it was sent as; and those rows'
        segments."""
        slots, kept_slots = self._slots(arrays.segment_lora_ids), self._slots(arrays.logits_segment_lora_ids)
        all_rows = take_all_rows(arrays.seg_indptr, slots)
        tiles = self._tiles(arrays.seg_indptr, slots, all_rows=all_rows)
        inputs = self._send(arrays, [*tiles, *self._tiles(arrays.logits_seg_indptr, kept_slots)])
        segments = Segments.build(arrays.seg_indptr, slots, tiles=inputs.tiles[: len(tiles)], all_rows=all_rows)
        asked = Segments.build(arrays.logits_seg_indptr, kept_slots, tiles=inputs.tiles[len(tiles) :])
        # with none to keep, the last layer is as good with all: there are kernels that do not take no rows
        kept = KeptRows(inputs.logits_rows, asked) if arrays.sampled else None
        meta = _attention(arrays, inputs, None)
        plans = self.model.plan_attention(meta, self.kv_cache.block_size)
        hidden = self.model.forward(
            inputs.input_ids(), inputs.positions, meta, plans, self.kv_cache.layers, segments,
            self._lora_store.model_lora if segments.has_lora else None, kept,
        )  # fmt: skip
        return hidden if arrays.sampled else hidden[:0], inputs, asked

    def _in_shape(self, arrays: BatchArrays, shape: StepShape, tiles: Tiles | None = None) -> tuple[Tensor, StepInputs]:
        """The final hidden states [T, hidden] of a step that was filled up to ``shape``, recorded if it was not before;
        and what it was sent as. ``tiles`` (None: those of ``arrays``): the kernel families' work."""
        slots = self._slots(arrays.segment_lora_ids)
        if tiles is None:
            tiles = self._tiles(arrays.seg_indptr, slots, shape)
        inputs = self._send(arrays, tiles)
        meta = _attention(arrays, inputs, self._page_capacity)
        plans = self.model.plan_attention(meta, self.kv_cache.block_size)
        segments = Segments.build(arrays.seg_indptr, slots, tiles=inputs.tiles)
        lora = self._lora_store.model_lora if segments.has_lora or tiles else None

        def forward() -> Tensor:
            return self.model.forward(
                inputs.input_ids(), inputs.positions, meta, plans, self.kv_cache.layers, segments, lora
            )

        assert self.graphs is not None
        key = GraphKey(shape, tuple((block_m, len(entries)) for block_m, entries in tiles))
        return self.graphs.run(key, forward), inputs

    def _send(self, arrays: BatchArrays, tiles: Tiles) -> StepInputs:
        return self._buffer.send(
            arrays.input_ids, arrays.seats, arrays.positions, arrays.slot_mapping, arrays.logits_rows,
            np.array([sequence.seat for sequence in arrays.sampled], dtype=np.int64), tiles,
        )  # fmt: skip

    def _tiles(
        self, seg_indptr: list[int], slots: list[int], shape: StepShape | None = None, *, all_rows: bool = False
    ) -> Tiles:
        """The work of each kernel family: as many tiles as there are, or as the step's shape has."""
        if self.model.device.type == "cpu":
            return []
        tiles = []
        for family in plan_families(seg_indptr, slots, all_rows=all_rows):
            count = family.num_tiles
            if shape is not None:  # twice as many tiles of single rows cost 1 %: a shape needs but one graph
                count = tile_bucket(shape.num_tokens if family.block_m == PER_ROW else count)
            tiles.append(
                (family.block_m, cut_tiles(seg_indptr, slots, family.block_m, count, segments=family.segments))
            )
        return tiles

    @property
    def _page_capacity(self) -> int:
        """Blocks in a step's tables: each of the pool's at most once, and the scratch block for what fills it up."""
        return self.kv_cache.num_blocks + self._settings.max_num_seqs + 2 * PREFILL_TOKENS[-1]

    def _slots(self, lora_ids: list[str | None]) -> list[int]:
        return [-1 if lora_id is None else self._lora_store.slot(lora_id) for lora_id in lora_ids]

    def _sampling(self, sequences: list[Sequence]) -> SamplingBatch:
        return SamplingBatch.build(
            [s.request.sampling for s in sequences],
            [s.request.row for s in sequences],
            [s.sample for s in sequences],
            [s.num_tokens for s in sequences],
            self._settings.seed,
        )


def _attention(arrays: BatchArrays, inputs: StepInputs, capacity: int | None) -> AttentionMetadata:
    return AttentionMetadata(
        inputs.slot_mapping, arrays.qo_indptr, arrays.kv_lens, arrays.block_tables, arrays.num_prefills,
        arrays.num_prefill_tokens, capacity,
    )  # fmt: skip


def _to_host(output: SamplerOutput) -> tuple[SamplerOutput, Any]:
    """Its tensors on the host when the event has come; themselves, and no event, where they are there."""
    if not output.token_ids.is_cuda:
        return output, None

    def copy(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    tensors = (output.token_ids, output.finite, output.chosen_logprobs, output.top_ids, output.top_logprobs)
    on_host = SamplerOutput(*map(copy, tensors))  # type: ignore[arg-type]
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return on_host, done
