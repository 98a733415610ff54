"""What is recorded, and what is replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from punica_batch.engine.graphs import Forward, GraphKey, StepGraphs
from punica_batch.scheduler.padding import StepShape

KEY = GraphKey(StepShape(0, 0, 8), ())


class Recorder:
    def __init__(self, room: int) -> None:
        self.room, self.recorded, self.replayed = room, 0, 0

    def __call__(self, forward: Forward) -> Callable[[Forward], Tensor]:
        if self.recorded == self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.recorded += 1

        def replay(forward: Forward) -> Tensor:
            self.replayed += 1
            return forward()

        return replay


def test_a_step_is_recorded_once_and_replayed_from_then_on() -> None:
    recorder, ran = Recorder(2), list[int]()
    graphs = StepGraphs(recorder)

    def forward(number: int) -> Forward:
        return lambda: torch.tensor(ran.append(number) or number)

    others = (GraphKey(KEY.shape, ((16, 8),)), GraphKey(StepShape(4, 32, 8), ()))
    assert [int(graphs.run(KEY, forward(i))) for i in range(3)] == [0, 1, 2]
    assert (recorder.recorded, recorder.replayed, len(graphs)) == (1, 2, 1)
    assert [int(graphs.run(key, forward(i))) for i, key in enumerate((*others, *others), 3)] == [3, 4, 5, 6]
    # the third does not fit: its steps run as they are, and it is not tried again
    assert (recorder.recorded, recorder.replayed) == (2, 3)
    assert ran == list(range(7))
