"""A step's arrays filled up to one of a few shapes, so that steps can replay what was captured for their shape.

What fills up is valid in every respect, so that no kernel has to know of it: sequences of the base model whose keys
go to a block that is nobody's (``KVCache.scratch_block``) and whose outputs no one reads.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from punica_batch.scheduler.batch import BatchArrays

# Prefill rows of the shapes. A step with more takes longer than launching its kernels one by one, and attention that is
# planned for the step at hand is faster than what a graph must have planned for any of its shape.
PREFILL_TOKENS = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class StepShape:
    """``prefills`` sequences with ``prefill_tokens`` rows in all, then ``decodes`` sequences of one row each."""

    prefills: int
    prefill_tokens: int
    decodes: int

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decodes


def decode_bucket(count: int, max_num_seqs: int) -> int:
    """The number of decode rows to fill ``count`` up to: fine steps where a row more costs time, coarse ones below."""
    if count <= 8:
        bucket = 1 << (count - 1).bit_length() if count else 0
    else:
        step = 16 if count <= 64 else 32
        bucket = -(-count // step) * step
    return min(bucket, max_num_seqs)


def shape_for(arrays: BatchArrays, max_num_seqs: int) -> StepShape | None:
    """The smallest shape that holds the step; None where there is none, as it has too many prefill rows."""
    decodes = decode_bucket(len(arrays.sequences) - arrays.num_prefills, max_num_seqs)
    rows, sequences = arrays.num_prefill_tokens, arrays.num_prefills
    if not sequences:
        return StepShape(0, 0, decodes)
    for tokens in PREFILL_TOKENS[bisect_left(PREFILL_TOKENS, rows) :]:
        shape = _with_prefill(tokens, decodes)
        if sequences + (tokens > rows) <= shape.prefills:  # the rows that fill up are a sequence, too
            return shape
    return None


def full_shapes(max_num_seqs: int) -> list[StepShape]:
    """Those of a full batch, with prefills and without; the largest first."""
    mixed = [_with_prefill(tokens, max_num_seqs) for tokens in reversed(PREFILL_TOKENS)]
    return [*mixed, StepShape(0, 0, max_num_seqs)]


def _with_prefill(tokens: int, decodes: int) -> StepShape:
    return StepShape(tokens // 16 + 2, tokens, decodes)


def empty_arrays() -> BatchArrays:
    """A step of no sequences, to be filled up."""
    none, starts = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int32)
    return BatchArrays(
        input_ids=none, seats=none, positions=none, slot_mapping=none, qo_indptr=starts, kv_lens=starts[:0],
        block_tables=np.zeros((0, 1), dtype=np.int32), seg_indptr=[0], segment_lora_ids=[], logits_rows=none,
        logits_seg_indptr=[0], logits_segment_lora_ids=[], num_prefills=0, num_prefill_tokens=0, sequences=[],
        sampled=[],
    )  # fmt: skip


def pad(arrays: BatchArrays, shape: StepShape, scratch_block: int, block_size: int) -> BatchArrays:
    """The step in ``shape``, which must hold it; ``sequences`` and ``sampled`` are still the real ones."""
    rows, sequences = arrays.num_prefill_tokens, arrays.num_prefills
    gap, more = shape.prefill_tokens - rows, shape.num_tokens - shape.prefill_tokens - (arrays.num_tokens - rows)
    places = shape.prefills - sequences

    def by_row(values: NDArray[Any], fill: int) -> NDArray[Any]:
        return _insert(values, rows, gap, more, fill)

    # one sequence has all rows that fill up the prefills; further ones have none
    starts = arrays.qo_indptr
    qo_indptr = np.concatenate([
        starts[: sequences + 1], np.full(places, shape.prefill_tokens, np.int32),
        np.arange(shape.prefill_tokens + 1, shape.num_tokens + 1, dtype=np.int32),
    ])  # fmt: skip
    kv_lens = _insert(arrays.kv_lens, sequences, places, more, 1)
    if places:
        kv_lens[sequences] = max(gap, 1)
    width = max(arrays.block_tables.shape[1], -(-gap // block_size))
    tables = np.zeros((len(kv_lens), width), dtype=np.int32)
    tables[sequences : shape.prefills] = tables[len(kv_lens) - more :] = scratch_block
    tables[:sequences, : arrays.block_tables.shape[1]] = arrays.block_tables[:sequences]
    tables[shape.prefills : len(kv_lens) - more, : arrays.block_tables.shape[1]] = arrays.block_tables[sequences:]
    seg_indptr, segment_lora_ids = _pad_segments(arrays, gap, more)
    return replace(
        arrays,
        input_ids=by_row(arrays.input_ids, 0),
        seats=by_row(arrays.seats, -1),
        positions=by_row(arrays.positions, 0),
        slot_mapping=by_row(arrays.slot_mapping, scratch_block * block_size),
        qo_indptr=qo_indptr,
        kv_lens=kv_lens,
        block_tables=tables,
        seg_indptr=seg_indptr,
        segment_lora_ids=segment_lora_ids,
        logits_rows=arrays.logits_rows + gap * (arrays.logits_rows >= rows),
        num_prefills=shape.prefills,
        num_prefill_tokens=shape.prefill_tokens,
    )


def _insert(values: NDArray[Any], at: int, gap: int, more: int, fill: int) -> NDArray[Any]:
    """``gap`` times ``fill`` before ``at``, ``more`` times at the end."""
    filled = np.full(len(values) + gap + more, fill, dtype=values.dtype)
    filled[:at], filled[at + gap : at + gap + len(values) - at] = values[:at], values[at:]
    return filled


def _pad_segments(arrays: BatchArrays, gap: int, more: int) -> tuple[list[int], list[str | None]]:
    """With base rows between prefills and decodes, which may cut a segment in two, and at the end."""
    border = arrays.num_prefill_tokens
    indptr, lora_ids = [0], list[str | None]()

    def append(end: int, lora_id: str | None) -> None:
        if end <= indptr[-1]:
            return
        if lora_ids and lora_ids[-1] == lora_id:
            indptr[-1] = end
        else:
            indptr.append(end)
            lora_ids.append(lora_id)

    for end, lora_id in zip(arrays.seg_indptr[1:], arrays.segment_lora_ids, strict=True):
        append(min(end, border), lora_id)
        if end > border:
            append(border + gap, None)
            append(end + gap, lora_id)
    append(border + gap, None)
    append(arrays.num_tokens + gap + more, None)
    return indptr, lora_ids
