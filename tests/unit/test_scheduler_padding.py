"""Steps filled up to a shape: what is real stays what it was, what fills up is valid and nobody's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from punica_batch_kernels.attention.flashinfer_backend import RECURRING_PREFILL
from scheduler_gold import make_request

from punica_batch.scheduler.batch import BatchArrays, build_arrays
from punica_batch.scheduler.padding import StepShape, decode_bucket, empty_arrays, full_shapes, pad, shape_for
from punica_batch.scheduler.scheduled import ScheduledSequence, arrange
from punica_batch.scheduler.sequence import Sequence

BLOCK, SCRATCH, MAX_SEQS = 4, 999, 48
ADAPTERS = st.sampled_from([None, "a", "b", "c"])
PROMPTS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 20), ADAPTERS), max_size=8)  # rows, computed, adapter
DECODES = st.lists(st.tuples(st.integers(2, 60), ADAPTERS), max_size=MAX_SEQS)  # length, adapter


def step(prompts: list[tuple[int, int, str | None]], decodes: list[tuple[int, str | None]]) -> BatchArrays:
    items, blocks = [], iter(range(10_000))
    for row, (length, done, lora_id) in enumerate([*prompts, *((1, n - 1, lora_id) for n, lora_id in decodes)]):
        sequence = Sequence(make_request(row, done + length, lora_id), arrival=row, num_computed_tokens=done, seat=row)
        sequence.block_table.extend(next(blocks) for _ in range(-(-(done + length) // BLOCK)))
        items.append(ScheduledSequence(sequence, length, samples=True))
    return build_arrays(arrange(items, []), BLOCK)


@given(PROMPTS, DECODES)
def test_a_padded_step(prompts: list[tuple[int, int, str | None]], decodes: list[tuple[int, str | None]]) -> None:
    if not prompts and not decodes:
        decodes = [(2, "a")]
    arrays = step(prompts, decodes)
    shape = shape_for(arrays, MAX_SEQS)
    if shape is None:
        assert arrays.num_prefill_tokens > 256 or arrays.num_prefills > 256 // 16
        return
    padded = pad(arrays, shape, SCRATCH, BLOCK)
    check_shapes(padded, shape)
    gap = shape.prefill_tokens - arrays.num_prefill_tokens
    rows = np.arange(arrays.num_tokens) + gap * (np.arange(arrays.num_tokens) >= arrays.num_prefill_tokens)
    places = np.arange(len(arrays.sequences))
    places += (shape.prefills - arrays.num_prefills) * (places >= arrays.num_prefills)
    # what is real
    for name in ("input_ids", "seats", "positions", "slot_mapping"):
        assert (getattr(padded, name)[rows] == getattr(arrays, name)).all()
    assert (padded.kv_lens[places] == arrays.kv_lens).all()
    width = arrays.block_tables.shape[1]
    assert (padded.block_tables[places, :width] == arrays.block_tables).all()
    assert (padded.qo_indptr[places + 1] - 1 == rows[arrays.qo_indptr[1:] - 1]).all()
    assert (padded.logits_rows == rows[arrays.logits_rows]).all()
    assert (padded.sequences, padded.sampled) == (arrays.sequences, arrays.sampled)
    loras = adapters(padded)
    assert [loras[row] for row in rows] == adapters(arrays)
    # what fills up
    others = np.setdiff1d(np.arange(shape.num_tokens), rows)
    assert (padded.slot_mapping[others] == SCRATCH * BLOCK).all()
    assert (padded.seats[others] == -1).all()
    assert not [loras[row] for row in others if loras[row] is not None]
    for place in np.setdiff1d(np.arange(len(padded.kv_lens)), places):
        blocks = -(-padded.kv_lens[place] // BLOCK)
        assert padded.kv_lens[place] >= 1
        assert (padded.block_tables[place, :blocks] == SCRATCH).all()


def check_shapes(padded: BatchArrays, shape: StepShape) -> None:
    count = shape.prefills + shape.decodes
    assert padded.num_tokens == len(padded.positions) == len(padded.slot_mapping) == shape.num_tokens
    assert len(padded.kv_lens) == len(padded.block_tables) == len(padded.qo_indptr) - 1 == count
    lengths = np.diff(padded.qo_indptr)
    assert (lengths >= 0).all()
    assert (lengths <= padded.kv_lens).all()
    assert lengths[: shape.prefills].sum() == shape.prefill_tokens == padded.num_prefill_tokens
    assert (lengths[shape.prefills :] == 1).all()
    assert padded.num_prefills == shape.prefills
    assert padded.qo_indptr.dtype == padded.kv_lens.dtype == padded.block_tables.dtype == np.int32


def adapters(arrays: BatchArrays) -> list[str | None]:
    """One a row; checks that neighbouring segments differ."""
    assert arrays.seg_indptr[0] == 0
    assert all(a != b for a, b in pairwise(arrays.segment_lora_ids))
    runs = zip(pairwise(arrays.seg_indptr), arrays.segment_lora_ids, strict=True)
    return [lora_id for (start, stop), lora_id in runs for _ in range(stop - start)]


def test_shapes() -> None:
    assert [decode_bucket(n, 300) for n in (0, 1, 2, 3, 8, 9, 17, 64, 65, 256, 290)] == [
        0, 1, 2, 4, 8, 16, 32, 64, 96, 256, 300,
    ]  # fmt: skip
    assert shape_for(step([], [(5, "a")] * 9), 48) == StepShape(0, 0, 16)
    assert shape_for(step([(20, 0, None)], [(5, "a")] * 9), 48) == StepShape(4, 32, 16)
    # 32 rows in four sequences need no fifth one; 31 rows do
    assert shape_for(step([(8, 0, None)] * 4, []), 48) == StepShape(4, 32, 0)
    assert shape_for(step([*[(8, 0, None)] * 3, (7, 0, None)], []), 48) == StepShape(6, 64, 0)
    assert shape_for(step([(257, 0, None)], []), 48) is None


@pytest.mark.parametrize("shape", [StepShape(0, 0, 16), StepShape(6, 64, 32), StepShape(4, 32, 0)])
def test_a_step_of_nothing(shape: StepShape) -> None:
    padded = pad(empty_arrays(), shape, SCRATCH, BLOCK)
    check_shapes(padded, shape)
    assert adapters(padded) == [None] * shape.num_tokens


def test_the_shapes_of_a_full_batch_are_those_that_its_steps_have() -> None:
    shapes = full_shapes(MAX_SEQS)
    decodes: list[tuple[int, str | None]] = [(5, None)] * MAX_SEQS
    for rows in (None, 2, 32, 33, 200, 256):
        prompts: list[tuple[int, int, str | None]] = [] if rows is None else [(rows, 0, None)]
        assert shape_for(step(prompts, decodes), MAX_SEQS) in shapes
    assert shapes == sorted(shapes, key=lambda shape: -shape.num_tokens)
    assert (shapes[0].prefill_tokens, shapes[0].prefills) == RECURRING_PREFILL  # attention has room for those
