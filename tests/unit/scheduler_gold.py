"""A naive second implementation of the scheduler's rules and a toy device, to hold the real one against.

Everything is per row and per token, in plain lists and dicts: slow and obvious.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from punica_batch.scheduler.batch import BatchArrays
from punica_batch.scheduler.scheduler import ScheduledBatch, Scheduler, SchedulerConfig
from punica_batch.scheduler.sequence import Sequence
from punica_batch.types import Request, SamplingParams


def make_request(row: int, prompt: int, lora_id: str | None = None, max_tokens: int = 4, n: int = 1) -> Request:
    tokens = np.array([(row * 7919 + i * 31) % 1000 for i in range(prompt)], dtype=np.int32)
    return Request(row, tokens, lora_id, SamplingParams(max_tokens=max_tokens, n=n))


def next_token(tokens: list[int], lora_id: str | None, sample: int) -> int:
    """The toy model: depends on every token before, the adapter and the sample."""
    return zlib.crc32(repr((tokens, lora_id, sample)).encode()) % 1000


def solo_output(request: Request, sample: int, length: int) -> list[int]:
    tokens = request.prompt_token_ids.tolist()
    for _ in range(length):
        tokens.append(next_token(tokens, request.lora_id, sample))
    return tokens[request.num_prompt_tokens :]


class ToySlots:
    """``capacity`` slots with LRU; a load takes ``delay`` steps. Checks what a real store would rely on."""

    def __init__(self, capacity: int, delay: int = 0) -> None:
        self.capacity, self.delay = capacity, delay
        self.loaded: list[str] = []  # least recently used first
        self.loading: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.requested: list[str] = []
        self.loads = 0

    def ready(self, lora_id: str) -> bool:
        if lora_id not in self.loaded:
            return False
        self.loaded.remove(lora_id)
        self.loaded.append(lora_id)
        return True

    def request(self, lora_id: str) -> None:
        self.requested.append(lora_id)
        if lora_id in self.loaded or lora_id in self.loading:
            return
        if len(self.loaded) + len(self.loading) == self.capacity:
            victim = next((name for name in self.loaded if not self.pins.get(name)), None)
            if victim is None:
                return
            self.loaded.remove(victim)
        self.loads += 1
        self.loading[lora_id] = self.delay

    def pin(self, lora_id: str) -> None:
        assert lora_id in self.loaded
        self.pins[lora_id] = self.pins.get(lora_id, 0) + 1

    def unpin(self, lora_id: str) -> None:
        assert self.pins[lora_id] > 0
        self.pins[lora_id] -= 1

    def tick(self) -> None:
        for lora_id in list(self.loading):
            self.loading[lora_id] -= 1
            if self.loading[lora_id] < 0:
                del self.loading[lora_id]
                self.loaded.append(lora_id)


@dataclass
class Toy:
    """What the gold policy knows of a sequence."""

    request: Request
    sample: int
    arrival: int
    computed: int = 0
    known: int = 0
    blocks: int = 0
    passed: int = 0


@dataclass
class GoldPolicy:
    """The rules, row by row. Keys are (row, sample)."""

    config: SchedulerConfig
    waiting: list[Toy] = field(default_factory=list)
    running: list[Toy] = field(default_factory=list)
    arrivals: int = 0

    def add(self, request: Request, sample: int) -> None:
        self.waiting.append(Toy(request, sample, self.arrivals, known=request.num_prompt_tokens))
        self.arrivals += 1

    def drop(self, row: int, sample: int) -> None:
        self.waiting = [t for t in self.waiting if (t.request.row, t.sample) != (row, sample)]
        self.running = [t for t in self.running if (t.request.row, t.sample) != (row, sample)]

    def free(self) -> int:
        return self.config.num_blocks - sum(t.blocks for t in self.running)

    def longest(self, toy: Toy) -> int:
        total = min(toy.request.num_prompt_tokens + toy.request.sampling.max_tokens, self.config.max_model_len)
        return max(total - 1, toy.request.num_prompt_tokens)

    def step(self, ready: set[str]) -> tuple[dict[tuple[int, int], int], list[tuple[int, int]], list[str]]:
        """(tokens computed by sequence, preempted in order, adapters asked for)."""
        size, work, preempted = self.config.block_size, {}, []
        budget = self.config.max_num_batched_tokens
        for toy in sorted(self.running, key=lambda t: t.arrival):
            if toy not in self.running or toy.known - toy.computed != 1:
                continue
            while toy in self.running and toy.known > toy.blocks * size and self.free() == 0:
                newest = max(self.running, key=lambda t: t.arrival)
                newest.computed = newest.blocks = 0
                self.running.remove(newest)
                self.waiting.append(newest)
                preempted.append((newest.request.row, newest.sample))
            if toy in self.running:
                toy.blocks += toy.known > toy.blocks * size
                work[toy.request.row, toy.sample] = 1
                budget -= 1
        for toy in sorted(self.running, key=lambda t: t.arrival):
            take = min(toy.known - toy.computed, budget)
            if (toy.request.row, toy.sample) not in work and take:
                work[toy.request.row, toy.sample] = take
                budget -= take
        self.waiting.sort(key=lambda t: t.arrival)
        asked = [] if preempted else self.admit(work, budget, ready)
        return work, preempted, asked

    def admit(self, work: dict[tuple[int, int], int], budget: int, ready: set[str]) -> list[str]:
        wanted = {t.request.lora_id for t in self.running} - {None}
        skipped: list[Toy] = []
        rest: list[Toy] = []
        for index, toy in enumerate(list(self.waiting)):
            lora_id = toy.request.lora_id
            rest = self.waiting[index:]
            if (
                len(self.running) == self.config.max_num_seqs
                or budget == 0
                or any(s.passed >= self.config.age_bound for s in skipped)
            ):
                break
            if any(s.request.lora_id == lora_id for s in skipped):
                continue
            room = lora_id in wanted or len(wanted) < self.config.max_loras
            if lora_id is not None and room:
                wanted.add(lora_id)
            if lora_id is not None and not (room and lora_id in ready):
                skipped.append(toy)
                continue
            need = -(-min(toy.known + 1, self.longest(toy)) // self.config.block_size)
            if need > self.free():
                break
            toy.blocks = need
            self.running.append(toy)
            for s in skipped:
                s.passed += 1
            take = min(toy.known, budget)
            work[toy.request.row, toy.sample] = take
            budget -= take
            rest = self.waiting[index + 1 :]
        asked = [s.request.lora_id for s in skipped if s.request.lora_id in wanted]
        for toy in rest:
            lora_id = toy.request.lora_id
            if lora_id is not None and lora_id not in wanted and len(wanted) < self.config.max_loras:
                if any(s.request.lora_id == lora_id for s in skipped):
                    continue
                wanted.add(lora_id)
                if lora_id not in ready:
                    asked.append(lora_id)
        self.waiting = [t for t in self.waiting if t not in self.running]
        return asked

    def computed(self, work: dict[tuple[int, int], int]) -> None:
        for toy in self.running:
            count = work.get((toy.request.row, toy.sample), 0)
            toy.computed += count
            toy.known += toy.computed == toy.known and count > 0


def compute(scheduler: Scheduler, batch: ScheduledBatch, tokens: list[int]) -> None:
    """What follows ``schedule`` where each step's outcome is known before the next."""
    scheduler.advance(batch)
    for sequence, token in zip(batch.sampled, tokens, strict=True):
        sequence.take(token)


class ToyDevice:
    """Runs a step from its arrays alone: writes each row's token to its KV slot, then reads each row's whole past
    back through the block table. ``slots``: slot -> (row, sample, position, token)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.seats: dict[int, int] = {}  # the last token of the sequence that sits there
        self.slots: dict[int, tuple[int, int, int, int]] = {}
        self.computed: dict[tuple[int, int], int] = {}

    def run(self, arrays: BatchArrays, preempted: list[Sequence]) -> list[int]:
        for sequence in preempted:
            self.computed[sequence.request.row, sequence.sample] = 0
        self.check_shapes(arrays)
        lora_of_row = expand(arrays.seg_indptr, arrays.segment_lora_ids)
        written: set[int] = set()
        answers: dict[int, int] = {}
        for index, sequence in enumerate(arrays.sequences):
            key = (sequence.request.row, sequence.sample)
            first, last = int(arrays.qo_indptr[index]), int(arrays.qo_indptr[index + 1])
            for row in range(first, last):
                position, slot, token = (int(a[row]) for a in (arrays.positions, arrays.slot_mapping, arrays.input_ids))
                assert position == self.computed.get(key, 0), "a token is computed twice or left out"
                if arrays.seats[row] >= 0:
                    assert arrays.seats[row] == sequence.seat
                    token = self.seats[sequence.seat]
                else:
                    assert token == sequence.token_ids[position]
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = (*key, position, token)
                self.computed[key] = position + 1
                assert lora_of_row[row] == sequence.lora_id
            assert arrays.kv_lens[index] == self.computed[key]
        for index, sequence in enumerate(arrays.sequences):
            past = [self.read(arrays, index, position) for position in range(int(arrays.kv_lens[index]))]
            assert [(row, sample, position) for row, sample, position, _ in past] == [
                (sequence.request.row, sequence.sample, position) for position in range(len(past))
            ], "another sequence's keys, or keys out of place"
            last_row = int(arrays.qo_indptr[index + 1]) - 1
            answers[last_row] = next_token([token for *_, token in past], sequence.lora_id, sequence.sample)
        sampled = [answers[row] for row in arrays.logits_rows.tolist()]
        self.seats |= {sequence.seat: token for sequence, token in zip(arrays.sampled, sampled, strict=True)}
        return sampled

    def read(self, arrays: BatchArrays, index: int, position: int) -> tuple[int, int, int, int]:
        block = int(arrays.block_tables[index, position // self.block_size])
        return self.slots[block * self.block_size + position % self.block_size]

    def check_shapes(self, arrays: BatchArrays) -> None:
        rows, count = arrays.num_tokens, len(arrays.sequences)
        assert arrays.positions.shape == arrays.slot_mapping.shape == (rows,)
        assert arrays.qo_indptr.shape == (count + 1,)
        assert arrays.kv_lens.shape == (count,)
        assert arrays.block_tables.shape[0] == count
        assert arrays.qo_indptr[0] == 0
        assert arrays.qo_indptr[-1] == rows
        assert arrays.slot_mapping.dtype == arrays.input_ids.dtype == arrays.positions.dtype == np.int64
        assert arrays.block_tables.dtype == arrays.qo_indptr.dtype == arrays.kv_lens.dtype == np.int32
        assert arrays.num_prefill_tokens == arrays.qo_indptr[arrays.num_prefills]
        assert all(np.diff(arrays.qo_indptr)[arrays.num_prefills :] == 1)
        logits_loras = expand(arrays.logits_seg_indptr, arrays.logits_segment_lora_ids)
        assert logits_loras == [sequence.lora_id for sequence in arrays.sampled]
        ends = {int(end) - 1: seq for end, seq in zip(arrays.qo_indptr[1:], arrays.sequences, strict=True)}
        assert [ends[row] for row in arrays.logits_rows.tolist()] == arrays.sampled


def expand(indptr: list[int], loras: list[str | None]) -> list[str | None]:
    """One adapter a row; checks that segments are not empty and that neighbours differ."""
    assert indptr[0] == 0
    assert all(a < b for a, b in pairwise(indptr))
    assert all(a != b for a, b in pairwise(loras))
    return [lora for lora, (a, b) in zip(loras, pairwise(indptr), strict=True) for _ in range(b - a)]


def check_order(batch: ScheduledBatch) -> None:
    """Each half has one run an adapter, and an adapter of both halves stands on both sides of the border."""
    halves = [[item.sequence.lora_id for item in half] for half in (batch.prefills, batch.decodes)]
    for half in halves:
        runs = [lora for i, lora in enumerate(half) if i == 0 or half[i - 1] != lora]
        assert len(runs) == len(set(runs))
    if set(halves[0]) & set(halves[1]):
        assert halves[0][-1] == halves[1][0]
