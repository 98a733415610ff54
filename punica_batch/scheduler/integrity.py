"""What must hold of a scheduler between any two calls, for tests and debugging."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from punica_batch.scheduler.block_pool import BlockPool
from punica_batch.scheduler.sequence import Sequence, SequenceStatus
from punica_batch.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from punica_batch.scheduler.scheduler import SchedulerConfig


def check(
    config: SchedulerConfig,
    pool: BlockPool,
    running: list[Sequence],
    waiting: WaitingQueue,
    running_loras: Counter[str],
    free_seats: list[int],
) -> None:
    """Asserts it. ``running_loras``: how many running sequences each adapter is said to have. O(blocks)."""
    pool.check_integrity(sequence.block_table for sequence in running)
    arrivals = [sequence.arrival for sequence in running]
    assert arrivals == sorted(set(arrivals)), "running sequences are out of order"
    assert len(running) <= config.max_num_seqs
    loras = Counter(s.lora_id for s in running if s.lora_id is not None)
    assert loras == running_loras
    assert len(loras) <= config.max_loras
    assert sorted([s.seat for s in running] + free_seats) == list(range(config.max_num_seqs))
    for sequence in running:
        assert sequence.status is SequenceStatus.RUNNING
        assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
        assert sequence.num_computed_tokens <= len(sequence.block_table) * config.block_size
    assert len(list(waiting)) == len(waiting)
    for sequence in waiting:
        assert sequence.status is SequenceStatus.WAITING
        assert not sequence.block_table
        assert sequence.num_computed_tokens == 0
        assert sequence.seat == -1
