"""The step buffer: what is sent arrives, and what a recorded step reads stays in its place."""

from __future__ import annotations

import numpy as np
import torch

from punica_batch.engine.step_buffer import StepBuffer, StepInputs


def send(buffer: StepBuffer, rows: int, sampled: int, tiles: tuple[int, ...] = (), first: int = 100) -> StepInputs:
    numbers = np.arange(first, first + rows, dtype=np.int64)
    row_seats = np.where(numbers % 3 == 0, numbers % 4, -1)
    places = np.arange(sampled, dtype=np.int64)
    entries = [(16, np.arange(4 * n, dtype=np.int32).reshape(n, 4) + first) for n in tiles]
    return buffer.send(numbers, row_seats, numbers + 1, numbers + 2, places, places + 1, entries)


def test_what_is_sent_arrives() -> None:
    buffer = StepBuffer(4, 32, torch.device("cpu"))
    buffer.last_tokens.copy_(torch.tensor([7, 8, 9, 10]))
    inputs = send(buffer, 9, 5, (3, 2))
    ids = inputs.input_ids().tolist()
    assert ids == [100, 101, 9, 103, 104, 8, 106, 107, 7]  # 102, 105 and 108 are known to seats 2, 1 and 0 alone
    assert inputs.positions.tolist() == list(range(101, 110))
    assert inputs.slot_mapping.tolist() == list(range(102, 111))
    assert inputs.logits_rows.tolist() == [0, 1, 2, 3, 4]
    assert inputs.seats.tolist() == [1, 2, 3, 4, 5]
    assert [tiles.entries.shape[0] for tiles in inputs.tiles] == [3, 2]
    assert inputs.tiles[1].entries.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]]


def test_a_recorded_steps_numbers_stay_in_their_places() -> None:
    """Whatever a later step of its shape samples, and whatever steps came between."""
    buffer = StepBuffer(4, 32, torch.device("cpu"))
    first = send(buffer, 9, 5, (3, 2))
    places = [t.data_ptr() for t in (first.known, first.token_index, first.positions, first.slot_mapping)]
    tiles = [t.entries.data_ptr() for t in first.tiles]
    send(buffer, 32, 4, (32, 32))
    for sampled in (0, 1, 9):
        later = send(buffer, 9, sampled, (3, 2), first=300)
        assert places == [t.data_ptr() for t in (later.known, later.token_index, later.positions, later.slot_mapping)]
        assert tiles == [t.entries.data_ptr() for t in later.tiles]
        assert first.positions.tolist() == list(range(301, 310))
