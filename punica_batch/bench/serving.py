"""One load through the product's engine, from its first row's arrival to its last row's text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from punica_batch.bench.device import synchronize
from punica_batch.bench.popularity import LoadKind, load
from punica_batch.engine.engine import Engine
from punica_batch.errors import JobError
from punica_batch.types import Request, SamplingParams

SETTLE_STEPS = 4  # steps before measuring, after which nothing of a prompt is left


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """``prompts[i]`` int32 token ids of row i, which gets exactly ``new[i]`` more; ``lora_ids[i]`` None: the base
    model."""

    prompts: Sequence[NDArray[np.int32]]
    new: Sequence[int]
    lora_ids: Sequence[str | None]

    @classmethod
    def of(
        cls, kind: LoadKind, count: int, vocab_size: int, lora_ids: Sequence[str | None], longest: int = 512
    ) -> Rows:
        """A load's; ``longest`` shortens the decode load for small models."""
        prompts, new = load(kind, count, longest, vocab_size)
        return cls(prompts, new, lora_ids)

    def first(self, count: int) -> Rows:
        return Rows(self.prompts[:count], self.new[:count], self.lora_ids[:count])

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and answer."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """``step_seconds``: between the ends of one step and the next, as the caller saw them; ``mixed[i]``: step i also
    computed prompt tokens. ``bytes_copied``: of adapters, to the device. ``graphs_recorded``: of steps of a kind that
    had not been there before, which take as long as several."""

    seconds: float
    rows: int
    new_tokens: int
    step_seconds: NDArray[np.float64]
    mixed: NDArray[np.bool_]
    adapters_loaded: int
    bytes_copied: int
    preemptions: int
    graphs_recorded: int


def add(engine: Engine, rows: Rows) -> None:
    """Row i of them is the engine's row i. EOS ends nothing."""
    for row, (prompt, new, lora_id) in enumerate(zip(rows.prompts, rows.new, rows.lora_ids, strict=True)):
        engine.add(Request(row, prompt, lora_id, SamplingParams(max_tokens=new, ignore_eos=True)))


def steps_to_prefill(prompt_tokens: int, rows: int, batched_tokens: int) -> int:
    """The most steps that ``rows`` need until all of them decode, where a step computes ``batched_tokens``."""
    return 1 + -(-prompt_tokens // max(1, batched_tokens - rows))


def start(engine: Engine, rows: Rows) -> None:
    """Runs steps until all of them decode: an idle engine with room for them, and for their adapters, has steady steps
    then. Each row needs ``steps_to_prefill`` new tokens beside those to come."""
    # their adapters first: a row that waits for its own begins when others are near their end
    serve(engine, Rows([prompt[:1] for prompt in rows.prompts], [1] * len(rows.new), rows.lora_ids))
    before = engine.stats().prompt_tokens
    add(engine, rows)
    prompt_tokens = sum(len(prompt) for prompt in rows.prompts if len(prompt) > 1)  # one token is as a decode's
    while engine.has_work and engine.stats().prompt_tokens - before < prompt_tokens:
        engine.step()
    for _ in range(SETTLE_STEPS):
        engine.step()


def drop(engine: Engine, rows: int) -> None:
    """Ends rows 0 to ``rows`` - 1, and what is under way."""
    for row in range(rows):
        engine.abort(row)
    while engine.has_work:
        engine.step()


def serve(engine: Engine, rows: Rows) -> Served:
    """All rows at once, in order. Adapters load in the measured time; tokenization is not part of it.

    Raises ``JobError`` when a row fails, or gets another number of tokens than it was to get.
    """
    before, copied, graphs = engine.stats(), engine.lora_store.bytes_copied, _num_graphs(engine)
    synchronize(engine.runner.kv_cache.device)
    ends, steps, prompt_tokens = [time.perf_counter()], [before.steps], [before.prompt_tokens]
    add(engine, rows)
    finished = []
    while engine.has_work:
        finished += engine.step()
        stats = engine.stats()
        if stats.steps > steps[-1]:
            ends.append(time.perf_counter())
            steps.append(stats.steps)
            prompt_tokens.append(stats.prompt_tokens)
    seconds = time.perf_counter() - ends[0]
    for result in finished:
        tokens = 0 if result.error is not None else len(result.completions[0].token_ids)
        if tokens != rows.new[result.row]:
            raise JobError(
                f"row {result.row} of the load got {tokens} tokens, not {rows.new[result.row]}: {result.error}"
            )
    if len(finished) != len(rows.new):
        raise JobError(f"{len(finished)} of the load's {len(rows.new)} rows came back")
    stats = engine.stats()
    return Served(
        seconds=seconds,
        rows=len(finished),
        new_tokens=sum(rows.new),
        step_seconds=np.diff(ends) / np.diff(steps),
        mixed=np.diff(prompt_tokens) > 0,
        adapters_loaded=len({lora_id for lora_id in rows.lora_ids if lora_id is not None}),
        bytes_copied=engine.lora_store.bytes_copied - copied,
        preemptions=stats.preemptions - before.preemptions,
        graphs_recorded=_num_graphs(engine) - graphs,
    )


def _num_graphs(engine: Engine) -> int:
    return 0 if engine.runner.graphs is None else len(engine.runner.graphs)
