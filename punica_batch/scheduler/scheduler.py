"""One worker's continuous batching: which tokens of which sequences the next step computes.

Punica (arXiv 2310.18547), section 5, with several prefills in a step, chunked to a token budget and mixed with
decodes. Pure: no clock, no randomness, no device.

A caller may plan step t+1 while t runs: ``schedule`` reads how many tokens a sequence has, never which, so ``advance``
counts a step as soon as it is enqueued and ``Sequence.take`` brings its tokens' values later, before the next but one
is planned. Blocks, seats and adapter pins are free at once when a sequence ends, even while a step that names it is
under way: the device runs the steps in order, so whoever gets them next uses them later.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import KeysView
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from punica_batch.errors import UsageError
from punica_batch.scheduler import integrity
from punica_batch.scheduler.block_pool import BlockPool
from punica_batch.scheduler.scheduled import ScheduledBatch, ScheduledSequence, arrange
from punica_batch.scheduler.sequence import Sequence, SequenceStatus
from punica_batch.scheduler.waiting import Heads, WaitingQueue
from punica_batch.types import Request

__all__ = ["AdapterSlots", "ScheduledBatch", "ScheduledSequence", "Scheduler", "SchedulerConfig"]

_by_arrival = attrgetter("arrival")


class AdapterSlots(Protocol):
    """The device's adapter slots as far as the scheduler asks. Never called for the base model (None)."""

    def ready(self, lora_id: str) -> bool:
        """Whether the weights are in a slot now; counts as a use for LRU."""

    def request(self, lora_id: str) -> None:
        """Starts loading if a slot can be had (free, or held by an adapter that is not pinned); else does nothing."""

    def pin(self, lora_id: str) -> None:
        """One more running sequence uses the slot, which must be ready."""

    def unpin(self, lora_id: str) -> None:
        """One sequence fewer."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one worker. ``max_num_batched_tokens`` is the tokens a step may compute, ``max_num_seqs`` the
    sequences that may run, ``max_loras`` the distinct adapters among them. After ``age_bound`` newer sequences have
    been admitted ahead of one that waits for its adapter, none more are.

    Raises ``UsageError`` when a limit is below 1 or a full batch could not decode in one step.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int
    age_bound: int = 256

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_loras"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.age_bound < 0:
            raise UsageError(f"age_bound must not be negative, not {self.age_bound}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running row can decode in each step"
            )


class Scheduler:
    """``add`` sequences, then ``schedule`` → ``advance`` → (compute) → ``Sequence.take`` → ``finish`` those that ended,
    until none is left.

    Only sequences whose request ``fits`` may be added: another could never run.
    """

    def __init__(self, config: SchedulerConfig, slots: AdapterSlots) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        # may be lowered between steps
        self.max_num_batched_tokens, self.max_num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        self._slots = slots
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # oldest first
        self._running_loras: Counter[str] = Counter()
        self._seats = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_arrival = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waited_for(self) -> KeysView[str | None]:
        """The adapters that any sequence waits for (None: the base model), as they are at any time."""
        return self._waiting.adapters

    @property
    def running(self) -> list[Sequence]:
        """Oldest first (a copy)."""
        return list(self._running)

    @property
    def waiting(self) -> list[Sequence]:
        """Oldest first (a copy)."""
        return sorted(self._waiting, key=_by_arrival)

    def fits(self, request: Request) -> bool:
        """Whether one sample of the row could run to its longest end with the whole pool for itself."""
        return self.pool.blocks_for(self._max_kv_tokens(request)) <= self.config.num_blocks

    def add(self, sequence: Sequence) -> None:
        assert sequence.arrival < 0
        assert self.fits(sequence.request)
        sequence.arrival = self._next_arrival
        self._next_arrival += 1
        self._waiting.add(sequence)

    def schedule(self) -> ScheduledBatch | None:
        """Plans a step, or None when nothing can run now (no work, or all of it waits for adapters to load). A plan
        that is not followed by ``advance`` may be dropped: the next one takes it up.

        Running decodes first, then running prefills, then new ones: each oldest first. None is admitted in a step
        that preempted: the blocks just freed belong to those that run.
        """
        budget = self.max_num_batched_tokens
        items: list[ScheduledSequence] = []
        preempted = self._schedule_decodes(items)
        budget -= len(items)
        for sequence in self._running:
            if sequence.num_uncomputed_tokens > 1 and budget:
                budget -= self._take(items, sequence, budget)
        if not preempted and self._waiting:
            self._admit(items, budget)
        return arrange(items, preempted) if items else None

    def advance(self, batch: ScheduledBatch) -> None:
        """The step is enqueued: its tokens count as computed, and those that it samples as pending."""
        for item in batch.scheduled:
            item.sequence.num_computed_tokens += item.num_tokens
            item.sequence.num_pending += item.samples

    def finish(self, sequence: Sequence) -> None:
        """Ends a running sequence: its blocks are free and its adapter has one user less."""
        assert sequence.status is SequenceStatus.RUNNING
        self._stop_running(sequence)
        sequence.status = SequenceStatus.FINISHED

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is (between steps); nothing happens if it has ended."""
        if sequence.status is SequenceStatus.RUNNING:
            self.finish(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            sequence.status = SequenceStatus.FINISHED

    def preempt(self, keep: int) -> None:
        """Sends all but the ``keep`` oldest running sequences back to waiting; their tokens must be known."""
        for sequence in self._running[keep:][::-1]:
            self._preempt(sequence)

    def take_back(self, count: int) -> list[Sequence]:
        """Gives up to ``count`` rows (all samples of a row or none) that have not started, the newest rows first.
        They are no longer this scheduler's."""
        samples: dict[int, list[Sequence]] = {}
        for sequence in self._waiting:
            if not sequence.started:
                samples.setdefault(sequence.request.row, []).append(sequence)
        whole = [row for row in samples.values() if len(row) == row[0].request.sampling.n]
        whole.sort(key=lambda row: row[0].arrival, reverse=True)
        taken = [sequence for row in whole[: max(count, 0)] for sequence in row]
        for sequence in taken:
            self.abort(sequence)
        return taken

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls. For tests and debugging: O(blocks)."""
        integrity.check(self.config, self.pool, self._running, self._waiting, self._running_loras, self._seats)

    # -- planning a step ----------------------------------------------------------------------------------------

    def _schedule_decodes(self, items: list[ScheduledSequence]) -> list[Sequence]:
        """Every running decode, oldest first, preempting the newest where a block is needed and none is free."""
        preempted: list[Sequence] = []
        for sequence in list(self._running):
            if sequence.num_uncomputed_tokens != 1 or sequence.status is not SequenceStatus.RUNNING:
                continue
            needs_block = sequence.num_tokens > len(sequence.block_table) * self.config.block_size
            while needs_block and not self.pool.can_allocate(1) and sequence.status is SequenceStatus.RUNNING:
                preempted.append(self._preempt(self._running[-1]))
            if sequence.status is SequenceStatus.RUNNING:
                if needs_block:
                    sequence.block_table.extend(self.pool.allocate(1))
                self._take(items, sequence, 1)
        return preempted

    def _admit(self, items: list[ScheduledSequence], budget: int) -> None:
        """Starts waiting sequences in order of arrival while there are places, tokens and blocks for the oldest.

        An adapter that is not there yet is skipped with all its rows and asked for. ``may_pass`` is how many more
        may go ahead of those skipped.
        """
        heads = self._waiting.heads()
        wanted = set(self._running_loras)
        skipped: list[tuple[Sequence, int]] = []
        admitted = 0
        may_pass = self.max_num_seqs
        while (sequence := heads.peek()) is not None:
            if len(self._running) >= self.max_num_seqs or not budget or not may_pass:
                break
            if not self._adapter_ready(sequence.lora_id, wanted):
                skipped.append((sequence, admitted))
                may_pass = min(may_pass, max(self.config.age_bound - sequence.passed, 0))
                heads.skip_adapter()
                continue
            if not self._start(sequence):
                break
            heads.advance()
            budget -= self._take(items, sequence, budget)
            admitted += 1
            may_pass -= bool(skipped)
        for sequence, admitted_before in skipped:
            sequence.passed += admitted - admitted_before
        self._request_adapters([sequence.lora_id for sequence, _ in skipped], heads, wanted)

    def _adapter_ready(self, lora_id: str | None, wanted: set[str]) -> bool:
        if lora_id is None:
            return True
        if lora_id not in wanted and len(wanted) == self.config.max_loras:
            return False
        wanted.add(lora_id)
        return self._slots.ready(lora_id)

    def _request_adapters(self, skipped: list[str | None], heads: Heads, wanted: set[str]) -> None:
        """Asks for the adapters that come next, as many as there are slots beside those that run: after every one
        that is there has been touched, so that loading one of them does not evict another."""
        missing: list[str | None] = [lora_id for lora_id in skipped if lora_id in wanted]
        while len(wanted) < self.config.max_loras and (sequence := heads.peek()) is not None:
            if not self._adapter_ready(sequence.lora_id, wanted):
                missing.append(sequence.lora_id)
            heads.skip_adapter()
        for lora_id in missing:
            if lora_id is not None:
                self._slots.request(lora_id)

    def _start(self, sequence: Sequence) -> bool:
        """Moves a waiting sequence to running if the blocks for all its known tokens and the next one are free."""
        tokens = min(sequence.num_tokens + 1, self._max_kv_tokens(sequence.request))
        blocks = self.pool.blocks_for(tokens)
        if not self.pool.can_allocate(blocks):
            return False
        self._waiting.remove(sequence)
        sequence.block_table.extend(self.pool.allocate(blocks))
        sequence.status = SequenceStatus.RUNNING
        sequence.started = True
        sequence.seat = self._seats.pop()
        insort(self._running, sequence, key=_by_arrival)
        if sequence.lora_id is not None:
            self._running_loras[sequence.lora_id] += 1
            self._slots.pin(sequence.lora_id)
        return True

    def _preempt(self, sequence: Sequence) -> Sequence:
        self._stop_running(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        self._waiting.add(sequence)
        return sequence

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._seats.append(sequence.seat)
        sequence.seat = -1
        self.pool.free(reversed(sequence.block_table))
        del sequence.block_table[:]
        if sequence.lora_id is not None:
            self._running_loras[sequence.lora_id] -= 1
            if not self._running_loras[sequence.lora_id]:
                del self._running_loras[sequence.lora_id]
            self._slots.unpin(sequence.lora_id)

    def _max_kv_tokens(self, request: Request) -> int:
        """Positions that the row can come to hold in the cache: the last token sampled is never computed."""
        longest = min(request.num_prompt_tokens + request.sampling.max_tokens, self.config.max_model_len)
        return max(longest - 1, request.num_prompt_tokens)

    @staticmethod
    def _take(items: list[ScheduledSequence], sequence: Sequence, budget: int) -> int:
        left = sequence.num_uncomputed_tokens
        num_tokens = min(left, budget)
        items.append(ScheduledSequence(sequence, num_tokens, samples=num_tokens == left))
        return num_tokens
