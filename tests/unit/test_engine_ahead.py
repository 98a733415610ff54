"""Steps planned ahead change no row's outcome: random mixes of rows, aborts, failures and full memory, against a plain
loop over each row's tokens.

The device here is a few arrays: a token's key is the token itself, and what is sampled depends on all keys that the
row's block table names. So a wrong block, seat, position or adapter changes what comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import letters

from punica_batch.engine.engine import Engine
from punica_batch.engine.model_runner import SampledTokens
from punica_batch.engine.rows import Endings
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import RowError
from punica_batch.scheduler.batch import BatchArrays
from punica_batch.scheduler.padding import pad, shape_for
from punica_batch.types import AdapterSpec, Request, RowResult, SamplingParams

VOCAB, EOS, NAN = 26, 9, -1
MAX_MODEL_LEN, BLOCK_SIZE = 24, 4
ADAPTERS = (None, "a", "b", "bad", "once")


def next_token(tokens: list[int], request: Request, sample: int) -> int:
    """What the model makes of a sequence: any letter, an EOS in eight, NaN in sixty-four."""
    chance = crc32(repr((tokens, request.row, request.lora_id, sample)).encode()) >> 8
    if chance % 64 == 0:
        return NAN
    return EOS if chance % 8 == 1 else chance // 64 % VOCAB


@dataclass
class Device:
    """Runs each step as it is enqueued, as a stream would; ``full`` says which of them run out of memory."""

    engine_settings: EngineSettings
    slot: Callable[[str], int]
    full: set[int] = field(default_factory=set)
    calls: int = 0
    has_failed: bool = False

    def __post_init__(self) -> None:
        blocks = self.engine_settings.num_blocks
        self.keys = np.full((blocks + 1) * BLOCK_SIZE, -7, dtype=np.int64)
        self.last_tokens = np.full(self.engine_settings.max_num_seqs, -7, dtype=np.int64)

    def execute(self, arrays: BatchArrays) -> SampledTokens:
        self.calls += 1
        settings = self.engine_settings
        sampled, num_tokens = arrays.sampled, arrays.num_tokens
        if (shape := shape_for(arrays, settings.max_num_seqs)) is not None:
            arrays = pad(arrays, shape, settings.num_blocks, BLOCK_SIZE)
        for lora_id in arrays.segment_lora_ids:
            assert lora_id is None or self.slot(lora_id) >= 0
        known = np.where(arrays.seats >= 0, self.last_tokens[arrays.seats], arrays.input_ids)
        self.keys[arrays.slot_mapping] = known
        # a step of the smallest kind may fail but once: the engine gives up where it cannot make steps smaller
        if self.calls in self.full and (num_tokens > settings.max_num_seqs or not self.has_failed):
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        sequence_of = np.searchsorted(arrays.qo_indptr, arrays.logits_rows, side="right") - 1
        tokens = []
        for sequence, i in zip(sampled, sequence_of.tolist(), strict=True):
            slots = arrays.block_tables[i].astype(np.int64)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
            context = self.keys[slots.reshape(-1)[: arrays.kv_lens[i]]].tolist()
            tokens.append(next_token(context, sequence.request, sequence.sample))
            self.last_tokens[sequence.seat] = tokens[-1]
        return SampledTokens([max(t, 0) for t in tokens], [t != NAN for t in tokens], {})

    def collect(self, step: SampledTokens) -> SampledTokens:
        return step


class Slots:
    """An adapter store whose loads end when they are told to: "bad" never loads, "once" not a second time."""

    def __init__(self, max_loras: int) -> None:
        self.failures: dict[str, RowError] = {}
        self._free = list(range(max_loras))
        self._resident: dict[str, int] = {}  # least recently used first
        self._pins = Counter[str]()
        self._loading: dict[str, None] = {}
        self._loaded: list[str] = []
        self._loads = Counter[str]()

    def ready(self, lora_id: str) -> bool:
        if lora_id in self._resident:
            self._resident[lora_id] = self._resident.pop(lora_id)
        return lora_id in self._resident

    def request(self, lora_id: str) -> None:
        if lora_id not in self._loaded and lora_id not in self.failures:
            self._loading[lora_id] = None

    def prefetch(self, lora_ids: list[str]) -> None: ...

    def pin(self, lora_id: str) -> None:
        assert lora_id in self._resident
        self._pins[lora_id] += 1

    def unpin(self, lora_id: str) -> None:
        self._pins[lora_id] -= 1
        assert self._pins[lora_id] >= 0

    def slot(self, lora_id: str) -> int:
        return self._resident[lora_id]

    def sha256(self, lora_id: str | None) -> str | None:
        return lora_id

    def wait(self, timeout: float) -> None:
        """Ends the oldest load."""
        if self._loading:
            lora_id = next(iter(self._loading))
            del self._loading[lora_id]
            self._loaded.append(lora_id)

    def poll(self, *, rows_run: bool = False, waited_for: Any = ()) -> list[str]:
        failed = []
        for lora_id in list(self._loaded):
            if lora_id == "bad" or (lora_id == "once" and self._loads[lora_id]):
                self.failures[lora_id] = RowError("adapter_unreadable", "no such file")
                failed.append(lora_id)
            else:
                idle = [i for i in self._resident if not self._pins[i]]
                if not self._free and not idle:
                    continue
                self._resident[lora_id] = self._free.pop() if self._free else self._resident.pop(idle[0])
                self._loads[lora_id] += 1
            self._loaded.remove(lora_id)
        return failed

    @property
    def resident(self) -> list[str]:
        return list(self._resident)

    def check_integrity(self) -> None: ...


def make(steps_ahead: int, full: set[int], **options: Any) -> tuple[Engine, Slots]:
    adapters = {name: AdapterSpec(name, f"/adapters/{name}") for name in ADAPTERS if name is not None}
    engine_settings = EngineSettings(
        model="model", block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, adapters=adapters, **options
    )
    slots = Slots(engine_settings.max_loras)
    device = Device(engine_settings, slots.slot, full)
    endings = Endings(letters(), frozenset({EOS}), MAX_MODEL_LEN)
    engine = Engine(device, slots, endings, engine_settings, steps_ahead=steps_ahead)  # type: ignore[arg-type]
    return engine, slots


Outcome = list[tuple[tuple[int, ...], str, str]] | str


def oracle(request: Request) -> Outcome:
    """(tokens, text, why it ended) of each sample, or how the row's error begins."""
    if request.lora_id == "bad":
        return "adapter_unreadable: "
    samples = []
    for sample in range(request.sampling.n):
        tokens: list[int] = []
        reason = ""
        while not reason:
            token = next_token([*request.prompt_token_ids.tolist(), *tokens], request, sample)
            if token == NAN:
                return "nan_logits: "
            tokens.append(token)
            text = "".join(chr(97 + t) for t in tokens)
            stops = [at for stop in request.sampling.stop if (at := text.find(stop)) >= 0]
            if token == EOS:
                reason, text = "stop", text[:-1]
            elif stops:
                reason, text = "stop", text[: min(stops)]
            elif len(tokens) == request.sampling.max_tokens or len(text) + request.num_prompt_tokens == MAX_MODEL_LEN:
                reason = "length"
        samples.append((tuple(tokens), text, reason))
    return samples


def outcome(result: RowResult) -> Outcome:
    if result.error is not None:
        return result.error.split(":")[0] + ": "
    return [(c.token_ids, c.text, c.finish_reason.value) for c in result.completions]


rows = st.builds(
    lambda row, prompt, lora_id, tokens, n, stop: Request(
        row, np.array(prompt, np.int32), lora_id, SamplingParams(max_tokens=tokens, n=n, stop=tuple(stop))
    ),
    st.integers(0, 5),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
    st.sampled_from(ADAPTERS),
    st.integers(1, 30),
    st.integers(1, 3),
    st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=2),
)
actions = st.lists(
    st.one_of(
        rows,
        rows,
        st.just("step"),
        st.just("step"),
        st.just("load"),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("take back"), st.integers(1, 3)),
    ),
    max_size=60,
)
full_steps = st.sets(st.integers(1, 40), max_size=4)
sizes = st.fixed_dictionaries({
    "num_blocks": st.integers(6, 14), "max_num_seqs": st.integers(1, 5), "max_loras": st.integers(1, 2),
    "max_num_batched_tokens": st.sampled_from([64, 256]),
})  # fmt: skip


@pytest.mark.parametrize("steps_ahead", [0, 1])
@settings(max_examples=150, deadline=None)
@given(actions, full_steps, sizes)
def test_every_row_becomes_what_it_would_alone(
    steps_ahead: int, todo: list[Any], full: set[int], options: dict[str, int]
) -> None:
    engine, slots = make(steps_ahead, full, **options)
    in_work: dict[int, Request] = {}

    def step() -> None:
        for result in engine.step():
            request = in_work.pop(result.row)
            if request.lora_id != "once" or result.error is None or result.error.startswith("nan"):
                assert outcome(result) == oracle(request)
        engine.check_integrity()

    for action in todo:
        match action:
            case Request() if action.row not in in_work:
                in_work[action.row] = action
                engine.add(action)
            case "step":
                step()
            case "load":
                slots.wait(0)
            case ("abort", row):
                if in_work.pop(row, None) is not None:
                    engine._results = [result for result in engine._results if result.row != row]
                engine.abort(row)
            case ("take back", count):
                for request in engine.take_back(count):
                    assert in_work.pop(request.row) is request
        engine.check_integrity()
    for _ in range(3000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work
    assert not in_work
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def request(row: int, length: int, lora_id: str | None = None, **sampling: Any) -> Request:
    return Request(row, np.ones(length, np.int32), lora_id, SamplingParams(**sampling))


def test_a_row_number_comes_again_with_fewer_samples() -> None:
    """As in a second table: a step under way still names the third sample of the row that had the number before."""
    engine, _ = make(1, set(), num_blocks=20, max_num_seqs=4, max_loras=1, max_num_batched_tokens=256)
    engine.add(request(0, 2, n=3))
    engine.step()
    engine.step()
    engine.abort(0)
    again = request(0, 5, max_tokens=3)
    engine.add(again)
    results = [result for _ in range(10) for result in engine.step()]
    assert [outcome(result) for result in results] == [oracle(again)]


def test_full_memory_while_a_preempted_rows_token_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that preempted it is dropped; it is admitted again when another row goes, with all its tokens known."""
    monkeypatch.setitem(globals(), "next_token", lambda tokens, *_: len(tokens) % 8)
    engine, _ = make(1, {3}, num_blocks=6, max_num_seqs=4, max_loras=1, max_num_batched_tokens=256)
    first, second = request(0, 7, max_tokens=8), request(1, 15, max_tokens=8)
    engine.add(first)
    engine.add(second)
    for _ in range(3):
        engine.step()
    assert engine.stats().waiting == 1
    engine.abort(0)
    results = [result for _ in range(20) for result in engine.step()]
    assert [outcome(result) for result in results] == [oracle(second)]
