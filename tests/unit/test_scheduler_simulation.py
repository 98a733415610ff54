"""The scheduler, block pool and batch arrays against the brute-force simulation, over random workloads."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_gold import GoldPolicy, ToyDevice, ToySlots, check_order, make_request, solo_output

from punica_batch.scheduler.batch import build_arrays
from punica_batch.scheduler.scheduler import Scheduler, SchedulerConfig
from punica_batch.scheduler.sequence import Sequence, SequenceStatus
from punica_batch.types import Request

BORDER_LENGTHS = (1, 15, 16, 17, 31, 32, 33)
PROMPTS = st.tuples(st.sampled_from(BORDER_LENGTHS), st.sampled_from([None, "a", "b"]))


class Simulation:
    """Drives the real scheduler and the gold policy side by side; every step is compared."""

    def __init__(self, config: SchedulerConfig, delay: int, chance: random.Random, ahead: int = 0) -> None:
        self.config, self.chance, self.ahead = config, chance, ahead
        self.under_way: deque[tuple[list[Sequence], list[int]]] = deque()
        self.slots = ToySlots(config.max_loras, delay)
        self.scheduler = Scheduler(config, self.slots)
        self.gold = GoldPolicy(config)
        self.device = ToyDevice(config.block_size)
        self.lengths: dict[tuple[int, int], int] = {}  # where the toy model ends by stop or by length
        self.ended: Counter[tuple[int, int]] = Counter()
        self.dropped: set[tuple[int, int]] = set()
        self.preemptions = 0
        self.steps = 0

    def add(self, request: Request) -> None:
        if not self.scheduler.fits(request):
            return
        longest = min(request.sampling.max_tokens, self.config.max_model_len - request.num_prompt_tokens)
        for sample in range(request.sampling.n):
            self.lengths[request.row, sample] = self.chance.choice([longest, self.chance.randint(1, longest)])
            self.scheduler.add(Sequence(request, sample))
            self.gold.add(request, sample)

    def step(self) -> bool:
        ready = set(self.slots.loaded)
        self.slots.requested.clear()
        batch = self.scheduler.schedule()
        work, preempted, asked = self.gold.step(ready)
        assert self.slots.requested == asked
        self.slots.tick()
        self.steps += 1
        if batch is None:
            assert not work
            return self.collect(0)
        mine = {(item.sequence.request.row, item.sequence.sample): item.num_tokens for item in batch.scheduled}
        assert mine == work
        assert [(s.request.row, s.sample) for s in batch.preempted] == preempted
        self.preemptions += len(preempted)
        assert 0 < batch.num_tokens == sum(work.values()) <= self.config.max_num_batched_tokens
        check_order(batch)
        tokens = self.device.run(build_arrays(batch, self.config.block_size), batch.preempted)
        self.scheduler.advance(batch)
        self.gold.computed(work)
        self.scheduler.check_integrity()
        for sequence in batch.sampled:
            request = sequence.request
            longest = min(request.sampling.max_tokens, self.config.max_model_len - request.num_prompt_tokens)
            if sequence.num_output_tokens == longest:
                self.finish(sequence)
        self.under_way.append((batch.sampled, tokens))
        return self.collect(self.ahead)

    def collect(self, ahead: int) -> bool:
        """Brings what the steps but the last ``ahead`` have sampled; whether there is more to do."""
        while len(self.under_way) > ahead:
            for sequence, token in zip(*self.under_way.popleft(), strict=True):
                key = (sequence.request.row, sequence.sample)
                if key in self.dropped or len(sequence.output_token_ids) == self.lengths[key]:
                    continue  # it ended while this step was under way
                sequence.take(token)
                if len(sequence.output_token_ids) == self.lengths[key]:
                    self.finish(sequence)
                    self.ended[key] += 1
                    answer = solo_output(sequence.request, sequence.sample, self.lengths[key])
                    assert sequence.output_token_ids == answer
        self.scheduler.check_integrity()
        return bool(self.scheduler.num_running or self.scheduler.num_waiting or self.under_way)

    def finish(self, sequence: Sequence) -> None:
        if sequence.status is not SequenceStatus.FINISHED:
            self.scheduler.abort(sequence)
            self.gold.drop(sequence.request.row, sequence.sample)

    def disturb(self) -> None:
        """Now and then rows are aborted or taken back."""
        if self.chance.random() < 0.05:
            live = self.scheduler.running + self.scheduler.waiting
            if live:
                self.drop(sequence := self.chance.choice(live))
                self.scheduler.abort(sequence)
        if self.chance.random() < 0.05:
            for sequence in self.scheduler.take_back(self.chance.randint(0, 3)):
                assert not sequence.output_token_ids
                self.drop(sequence)
        self.scheduler.check_integrity()

    def drop(self, sequence: Sequence) -> None:
        self.gold.drop(sequence.request.row, sequence.sample)
        self.dropped.add((sequence.request.row, sequence.sample))

    def check_end(self) -> None:
        assert set(self.ended) | self.dropped == set(self.lengths)
        assert not set(self.ended) & self.dropped
        assert all(count == 1 for count in self.ended.values())
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.pool.num_free == self.config.num_blocks
        assert not any(self.slots.pins.values())


def random_config(chance: random.Random, tight: bool) -> SchedulerConfig:
    block_size = chance.choice([1, 2, 4, 16, 16, 16])
    max_num_seqs = chance.choice([4, 8] if tight else [1, 2, 4, 8, 16])
    return SchedulerConfig(
        num_blocks=chance.choice([5, 6] if tight else [4, 6, 9, 16, 40]) * 16 // block_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + chance.choice([0, 1, 7, 16, 100, 1000]),
        max_model_len=chance.choice([34, 64, 200]),
        max_loras=chance.choice([1, 2, 3, 5]),
        age_bound=chance.choice([0, 1, 5, 256]),
    )


def run(seed: int, *, tight: bool, disturbed: bool) -> Simulation:
    """``tight``: so few blocks for so long outputs that rows are preempted often. In every second run a step's outcome
    is known after the next step was planned."""
    chance = random.Random(seed)
    simulation = Simulation(random_config(chance, tight), chance.choice([0, 0, 1, 4]), chance, ahead=seed % 2)
    names = [None, *"abcdefgh"][: chance.randint(1, 9)]
    rows = [
        make_request(
            row,
            chance.choice(BORDER_LENGTHS) if chance.random() < 0.7 else chance.randint(1, 33),
            chance.choice(names),
            max_tokens=chance.choice([16, 40] if tight else [1, 2, 16, 40]),
            n=chance.choice([1, 1, 1, 2, 4]),
        )
        for row in range(chance.randint(1, 40))
    ]
    chunk = chance.choice([1, 4, len(rows)])
    more = True
    while rows or more:
        for request in rows[:chunk] if chance.random() < 0.5 else []:
            simulation.add(request)
            rows.remove(request)
        more = simulation.step()
        if disturbed:
            simulation.disturb()
        assert simulation.steps < 20_000, "starvation or deadlock"
    simulation.check_end()
    return simulation


@pytest.mark.parametrize("block", range(5))
def test_random_workloads_match_the_gold_policy(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        run(seed, tight=False, disturbed=False)


@pytest.mark.parametrize("block", range(5))
def test_tight_pools_preempt_and_recompute_without_a_trace(block: int) -> None:
    runs = [run(seed, tight=True, disturbed=False) for seed in range(1000 + block * 5, 1005 + block * 5)]
    assert sum(simulation.preemptions for simulation in runs) >= 5


@pytest.mark.parametrize("block", range(5))
def test_random_workloads_with_aborts_and_rows_taken_back(block: int) -> None:
    for seed in range(2000 + block * 8, 2008 + block * 8):
        run(seed, tight=seed % 2 == 0, disturbed=True)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.sampled_from(BORDER_LENGTHS), st.sampled_from([None, "a", "b"])), min_size=1, max_size=8
    ),
    num_blocks=st.integers(4, 12),
    budget=st.integers(4, 70),
    seed=st.integers(0, 5),
)
def test_block_borders(prompts: list[tuple[int, str | None]], num_blocks: int, budget: int, seed: int) -> None:
    """Prompts of 15, 16, 17, 32 and 33 tokens in blocks of 16, in pools that barely hold one of them."""
    config = SchedulerConfig(num_blocks, 16, 4, budget, 64, 2, 3)
    simulation = Simulation(config, 0, random.Random(seed))
    for row, (length, lora_id) in enumerate(prompts):
        simulation.add(make_request(row, length, lora_id, max_tokens=20))
    while simulation.step():
        assert simulation.steps < 5000
    simulation.check_end()
    assert len(simulation.ended) == len(prompts)
