"""Steps that run out of memory, and rows that change while a step is under way, over a runner that computes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_script import make, row, run, steps_ahead  # noqa: F401 (a fixture of all tests here)

from punica_batch.errors import JobError
from punica_batch.scheduler.batch import BatchArrays


def test_a_step_that_does_not_fit_the_memory_is_halved_until_it_does() -> None:
    engine = make(max_num_seqs=4, max_num_batched_tokens=32)
    runner, sizes = engine.runner, list[int]()
    execute = runner.execute

    def limited(arrays: BatchArrays) -> Any:
        sizes.append(arrays.num_tokens)
        if arrays.num_tokens > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return execute(arrays)

    runner.execute = limited  # type: ignore[method-assign]
    results = run(engine, *(row(i, length=10 + i) for i in range(3)))
    assert [len(results[i].completions[0].token_ids) for i in range(3)] == [5, 5, 5]
    assert sizes[:3] == [32, 16, 8]
    assert max(sizes[3:]) <= 8


def test_a_gpu_too_small_for_the_smallest_step_ends_the_job() -> None:
    engine = make(max_num_seqs=4, max_num_batched_tokens=32)

    def never(arrays: BatchArrays) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.runner.execute = never  # type: ignore[method-assign]
    with pytest.raises(JobError, match="a step of one sequence: free it, or lower --gpu-memory-utilization"):
        run(engine, row(0, length=30), row(1))


def test_a_gpu_too_small_for_the_batch_runs_half_of_it() -> None:
    engine = make(max_num_seqs=4, max_num_batched_tokens=8)
    runner, sizes = engine.runner, list[int]()
    execute = runner.execute

    def limited(arrays: BatchArrays) -> Any:
        sizes.append(len(arrays.sequences))
        if len(arrays.sequences) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return execute(arrays)

    runner.execute = limited  # type: ignore[method-assign]
    results = run(engine, *(row(i, length=1) for i in range(5)))
    assert [results[i].completions[0].token_ids for i in range(5)] == [(1,) * 5] * 5
    assert max(sizes[-8:]) == 2


def test_a_row_that_comes_again_gets_nothing_of_the_step_under_way() -> None:
    """It was dropped and given again while a step of its first time had not been collected."""
    engine = make(lambda r, s: [1, 2, 3, 4, 5])
    engine.add(row(0))
    engine.add(row(1))
    for _ in range(2):
        engine.step()
    engine.abort(0)
    results = run(engine, row(0, max_tokens=2))
    assert {i: r.completions[0].token_ids for i, r in results.items()} == {0: (1, 2), 1: (1, 2, 3, 4, 5)}
