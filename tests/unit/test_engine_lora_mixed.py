"""Whole engines whose adapters exceed their room together, in any mix of sizes: every row runs, the room is kept."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_script import EOS, ScriptedRunner, row
from letters import letters
from punica_batch_kernels.sgmv.types import LoraGroup

from punica_batch.engine.engine import Engine
from punica_batch.engine.lora_arena import Arena
from punica_batch.engine.lora_layout import ALIGN
from punica_batch.engine.lora_setup import adapter_bytes
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.rows import Endings
from punica_batch.engine.settings import EngineSettings
from punica_batch.models.config import ModelConfig
from punica_batch.models.lora import ModelLora
from punica_batch.types import AdapterSpec, RowResult


class Over:
    """The device's event of steps that are done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


@dataclass
class Loaded:
    sha256: str
    arena: Arena
    start: int
    nbytes: int
    bytes_copied: int = 0

    def install(self, model_lora: Any, slot: int, tables: Any) -> None:
        model_lora.embeddings[slot] = None

    def uninstall(self, model_lora: Any, slot: int, tables: Any) -> None:
        return

    def release(self, *, was_installed: bool) -> None:
        self.arena.free(self.start, self.nbytes, Over() if was_installed else None)


class Adapters:
    """Of ``sizes`` bytes, in an arena of ``room`` of them. Loads of these numbers of ``short`` ones lack memory
    elsewhere."""

    def __init__(self, sizes: dict[str, int], room: int, short: dict[str, range] | None = None) -> None:
        self.sizes, self.arena, self.loads, self.short = sizes, Arena(room), Counter[str](), short or {}
        self._lock, self._delays = threading.Lock(), random.Random(room)

    def load(self, name: str) -> Loaded:
        with self._lock:
            self.loads[name] += 1
            delay = self._delays.random() / 1000
        time.sleep(delay)
        if self.loads[name] in self.short.get(name, ()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Loaded(f"sha-{name}", self.arena, self.arena.allocate(self.sizes[name], name), self.sizes[name])


def run(
    adapters: Adapters, rows: Sequence[str | None], slots: int, threads: int = 2, ahead: int = 1, max_num_seqs: int = 8,
    tokens: Mapping[str | None, int] | None = None, step: float = 0.0, age_bound: int = 256,
) -> dict[int, RowResult]:  # fmt: skip
    """``rows``: their adapters; ``tokens``: of a row's answer, by adapter, 5 if none is named; ``step``: seconds that a
    step takes, of 1 ms at most that a load does."""
    settings = EngineSettings(
        model="model", num_blocks=64, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=32,
        max_model_len=40,
        max_loras=slots, age_bound=age_bound, adapters={name: AdapterSpec(name, f"/{name}") for name in adapters.sizes},
    )  # fmt: skip
    store: Any = LoraStore(
        ModelLora([], LoraGroup(1, (0, 1), [None] * slots), [None] * slots), adapters.load,
        max_loras=slots, read_ahead=4, num_threads=threads, arena=adapters.arena,
    )  # fmt: skip
    runner: Any = ScriptedRunner(lambda row, sample: [1] * 100, store.slot)
    engine = Engine(runner, store, Endings(letters(), frozenset({EOS}), 40), settings, steps_ahead=ahead)
    for number, name in enumerate(rows):
        engine.add(row(number, lora_id=name, max_tokens=(tokens or {}).get(name, 5)))
    results: dict[int, RowResult] = {}
    end = time.monotonic() + 30  # far more than all of it takes
    while engine.has_work and time.monotonic() < end:
        results |= {result.row: result for result in engine.step()}
        store.check_integrity()
        time.sleep(step)
    engine.close()
    assert sorted(results) == list(range(len(rows))), f"{dict(adapters.loads)} loads, {adapters.arena.free_bytes} free"
    return results


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("sizes", "slots"),
    [({"a": 11, "b": 11}, 2), ({"a": 20, "b": 20}, 2), ({"a": 11, "b": 10, "c": 3}, 3)],
)
def test_adapters_that_exceed_the_room_together_run_in_turn(sizes: dict[str, int], slots: int, ahead: int) -> None:
    adapters = Adapters(sizes, room=20)
    results = run(adapters, [*sizes] * 3, slots, ahead=ahead)
    assert all(result.error is None for result in results.values())
    assert adapters.loads.total() <= 4 * len(sizes), "they make way for each other"


@pytest.mark.parametrize("part", range(4))
def test_any_mix_of_sizes_comes_to_its_end(part: int) -> None:
    for seed in range(60 * part, 60 * (part + 1)):
        chance = random.Random(seed)
        room = chance.choice([20, 32, 50])
        choices = [1, 3, 5, 7, room // 2, room // 2 + 1, room]
        adapters = Adapters({f"a{i}": chance.choice(choices) for i in range(chance.randint(2, 6))}, room)
        rows = [chance.choice(list(adapters.sizes)) for _ in range(chance.randint(2, 25))]
        run(adapters, rows, chance.choice([2, 3, 6]), chance.choice([2, 4]), chance.choice([0, 1]))


def test_what_is_awaited_stays_while_rows_run() -> None:
    """More adapters are asked for than there is room for, as slots are counted by the smallest ones. (911 loads were
    made of these 12, before.)"""
    adapters = Adapters({f"a{i}": 8 if i % 3 == 0 else 1 for i in range(12)}, room=20)
    run(adapters, [f"a{i % 12}" for i in range(48)], slots=12)
    assert adapters.loads.total() <= 10 * 12


def test_a_load_short_of_memory_is_tried_again_and_not_forever() -> None:
    """Nor does what it had reserved stand in its way: two of them do not fit side by side."""
    adapters = Adapters({"a": 12, "b": 12, "c": 12}, room=20, short={"a": range(1, 3), "b": range(1, 100)})
    results = run(adapters, ["a", "b", "c"], slots=2)
    assert results[0].error is None
    assert results[1].error is not None
    assert results[1].error.startswith("adapter_unreadable")
    assert results[2].error is None
    assert 3 <= adapters.loads["a"] <= 6
    assert adapters.loads["b"] == 4


def test_loads_short_of_memory_are_counted_anew_after_one_that_was_not() -> None:
    adapters = Adapters({"a": 12, "b": 12}, room=20, short={"a": range(1, 100, 2)})
    results = run(adapters, ["a", "b"] * 12, slots=1, max_num_seqs=1)
    assert adapters.loads["a"] >= 8, "one makes way for the other"
    assert all(result.error is None for result in results.values())


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_is_awaited_stays_while_rows_of_the_base_model_fill_the_batch(ahead: int) -> None:
    adapters = Adapters({"a": 11, "b": 11}, room=20)
    run(adapters, [*[None] * 8, "a", "b"], slots=2, ahead=ahead, max_num_seqs=4, tokens={None: 30}, step=0.001)
    assert adapters.loads.total() <= 4


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_adapter_whose_rows_end_in_one_step_stays_for_those_that_wait(ahead: int) -> None:
    adapters = Adapters(dict.fromkeys("abcd", 10), room=20)
    rows = [name for name in "abcd" for _ in range(60)]
    run(adapters, rows, slots=2, ahead=ahead, tokens=dict.fromkeys("abcd", 1), step=0.001)
    assert adapters.loads.total() <= 12


def test_what_is_read_ahead_and_finds_no_room_in_one_piece_waits_for_a_change() -> None:
    """Between those of the others: its bytes are free, and nothing can go."""
    adapters = Adapters({"u": 2, "x": 3, "s": 3, "p": 3}, room=10)
    run(adapters, ["u", *[None] * 8, "x", "s", "p"], slots=1, threads=1, max_num_seqs=4, tokens={None: 30}, step=0.001)
    assert adapters.loads.total() <= 12


@pytest.mark.parametrize("seed", [12, 61, 168])
def test_small_ones_are_not_read_ahead_into_the_middle_of_what_a_large_one_needs(seed: int) -> None:
    """Again and again (45,192 loads in 30 s)."""
    chance = random.Random(seed)
    adapters = Adapters({f"a{i}": chance.choice([1, 1, 5, 13, 20]) for i in range(5)}, room=30)
    rows = [chance.choice([*adapters.sizes]) for _ in range(25)]
    run(adapters, rows, 1, 1, chance.choice([0, 1]), max_num_seqs=4, step=0.0005, age_bound=0)
    assert adapters.loads.total() <= 3 * len(rows)


@pytest.mark.parametrize("ahead", [0, 1])
def test_rows_of_one_adapter_that_end_together_are_not_interrupted_by_another(ahead: int) -> None:
    """(101 loads.)"""
    adapters = Adapters({"a": 10, "b": 10}, room=15)
    run(adapters, ["a"] * 200 + ["b"] * 200, slots=2, ahead=ahead, max_num_seqs=4, tokens={"a": 1, "b": 1}, step=0.001)
    assert adapters.loads.total() <= 6


@pytest.mark.parametrize("max_loras", [1, 4, 64])
def test_adapters_take_what_was_planned_for_them(max_loras: int) -> None:
    """However many are read ahead."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "rms_norm_eps": 1e-5}
    config = ModelConfig.from_dict(about | sizes, where="test")
    planned = 1 << 30
    settings = EngineSettings(
        model="model", num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8, max_loras=max_loras,
        max_lora_bytes=planned, adapters={f"a{i}": AdapterSpec(f"a{i}", "/a") for i in range(100)},
    )  # fmt: skip
    gaps = (max_loras + 16) * 2 * len(config.lora_modules()) * ALIGN * 2
    assert planned <= adapter_bytes(settings, config, torch.float16, read_ahead=16) <= planned + gaps + ALIGN
