"""A scheduled step as the index arrays that the model runner and the kernels take. Numpy over the batch: nothing
here loops over tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from punica_batch.scheduler.scheduled import ScheduledBatch, ScheduledSequence
from punica_batch.scheduler.sequence import Sequence

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """T rows of S sequences, prefill sequences first, decode sequences (one row each) last; R of them are sampled.

    - ``input_ids``, ``positions`` int64 [T]; ``slot_mapping`` int64 [T]: ``block * block_size + offset``;
    - ``seats`` int64 [T]: where the device has the row's token, which the host does not know yet (-1: it does, and it
      is in ``input_ids``);
    - ``qo_indptr`` int32 [S + 1]; ``kv_lens`` int32 [S], this step's rows included;
    - ``block_tables`` int32 [S, most blocks in use], unused entries 0;
    - ``seg_indptr`` [segments + 1], ``segment_lora_ids`` [segments]: runs of rows with one adapter (None: base);
    - ``logits_rows`` int64 [R]: the rows to sample from; ``sampled[i]`` is the sequence of ``logits_rows[i]``;
    - ``logits_seg_indptr``, ``logits_segment_lora_ids``: the same as the segments, over the R sampled rows;
    - ``num_prefills`` sequences and ``num_prefill_tokens`` rows come before the first decode.
    """

    input_ids: Int64
    seats: Int64
    positions: Int64
    slot_mapping: Int64
    qo_indptr: Int32
    kv_lens: Int32
    block_tables: Int32
    seg_indptr: list[int]
    segment_lora_ids: list[str | None]
    logits_rows: Int64
    logits_seg_indptr: list[int]
    logits_segment_lora_ids: list[str | None]
    num_prefills: int
    num_prefill_tokens: int
    sequences: list[Sequence]
    sampled: list[Sequence]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def build_arrays(batch: ScheduledBatch, block_size: int) -> BatchArrays:
    """Must be called between ``Scheduler.schedule`` and ``Scheduler.advance``."""
    items = batch.scheduled
    input_ids, seats = _tokens(batch)
    sequences = [item.sequence for item in items]
    counts = np.array([item.num_tokens for item in items], dtype=np.int64)
    starts = np.array([sequence.num_computed_tokens for sequence in sequences], dtype=np.int64)
    ends = starts + counts
    qo_indptr = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(counts, out=qo_indptr[1:])
    positions = np.arange(qo_indptr[-1]) + np.repeat(starts - qo_indptr[:-1], counts)
    block_tables = _block_tables(sequences, -(-ends // block_size))
    blocks = block_tables[np.repeat(np.arange(len(items)), counts), positions // block_size]
    samples = np.array([item.samples for item in items], dtype=bool)
    seg_indptr, segment_lora_ids = _segments((item.sequence.lora_id, item.num_tokens) for item in items)
    sampled = batch.sampled
    logits_seg_indptr, logits_segment_lora_ids = _segments((sequence.lora_id, 1) for sequence in sampled)
    return BatchArrays(
        input_ids=input_ids,
        seats=seats,
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * block_size + positions % block_size,
        qo_indptr=qo_indptr.astype(np.int32),
        kv_lens=ends.astype(np.int32),
        block_tables=block_tables,
        seg_indptr=seg_indptr,
        segment_lora_ids=segment_lora_ids,
        logits_rows=qo_indptr[1:][samples] - 1,
        logits_seg_indptr=logits_seg_indptr,
        logits_segment_lora_ids=logits_segment_lora_ids,
        num_prefills=len(batch.prefills),
        num_prefill_tokens=int(qo_indptr[len(batch.prefills)]),
        sequences=sequences,
        sampled=sampled,
    )


def _block_tables(sequences: list[Sequence], num_blocks: NDArray[Any]) -> Int32:
    tables = np.zeros((len(sequences), int(num_blocks.max())), dtype=np.int32)
    for row, sequence, count in zip(tables, sequences, num_blocks.tolist(), strict=True):
        row[:count] = np.frombuffer(sequence.block_table, dtype=np.int32, count=count)
    return tables


def _tokens(batch: ScheduledBatch) -> tuple[Int64, Int64]:
    """``input_ids`` and ``seats``. Only a decode's token can be unknown: what was preempted waits until all are."""

    def prefill(item: ScheduledSequence) -> Int32:
        assert not item.sequence.num_pending
        start = item.sequence.num_computed_tokens
        return item.sequence.tokens(start, start + item.num_tokens)

    def decode(sequence: Sequence) -> tuple[int, int]:
        if sequence.num_pending:
            return 0, sequence.seat
        outputs = sequence.output_token_ids
        return outputs[-1] if outputs else int(sequence.request.prompt_token_ids[-1]), -1

    last = np.array([decode(item.sequence) for item in batch.decodes], dtype=np.int64).reshape(-1, 2)
    input_ids = np.concatenate([*map(prefill, batch.prefills), last[:, 0]]).astype(np.int64)
    seats = np.full(len(input_ids), -1, dtype=np.int64)
    seats[len(seats) - len(last) :] = last[:, 1]
    return input_ids, seats


def _segments(runs: Iterable[tuple[str | None, int]]) -> tuple[list[int], list[str | None]]:
    """(adapter, rows) in order → starts and adapters of the segments, neighbours with one adapter merged."""
    indptr, lora_ids = [0], list[str | None]()
    for lora_id, rows in runs:
        if lora_ids and lora_ids[-1] == lora_id:
            indptr[-1] += rows
        else:
            lora_ids.append(lora_id)
            indptr.append(indptr[-1] + rows)
    return indptr, lora_ids
