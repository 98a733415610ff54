"""What a load's steps must move and compute, over what the device can do: its steps, played through without an engine.

Products, attention and adapters one after the other, each by the larger of its bytes' and its operations' time. An
engine whose parts run side by side, the bytes of one beside the operations of another, could pass it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from punica_batch.bench.device import Ceilings, time_step
from punica_batch.models.config import DTYPE_BYTES, ModelConfig
from punica_batch.models.layers import Linear
from punica_batch.models.llama import LlamaModel
from punica_batch.types import Dtype

_ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
_SAMPLED_ROWS = 512  # of a step, at most; beyond, in proportion
_QKV = ("q_proj", "k_proj", "v_proj")
_LARGE = 1024  # rows from which products draw so much power that only the times of a whole second are sustained


@dataclass(frozen=True, slots=True)
class Work:
    """One step: ``tokens`` computed, ``sampled`` of them, ``kv_tokens`` positions of the cache read, ``pairs`` of query
    and key in prefills, ``adapters`` in the batch by number."""

    tokens: int
    sampled: int
    kv_tokens: int
    pairs: int
    adapters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds of a load's steps: those that each part needs at the least, and in all, one part after the other."""

    products: float
    attention: float
    adapters: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.adapters


class ProductTable:
    """Measured seconds of a step's matrix products by rows: ``layers`` those that all of its tokens pass through,
    ``sampled`` those that only the sampled ones do: the last layer's after attention, and the vocabulary's.

    Between the rows that were measured, linear; beyond them at the last one's rate."""

    def __init__(self, rows: Sequence[int], layers: Sequence[float], sampled: Sequence[float]) -> None:
        self.rows, self.layers, self.sampled = rows, layers, sampled

    @classmethod
    def measure(cls, model: LlamaModel, rows: Sequence[int] = _ROWS) -> ProductTable:
        """Each by a CUDA graph's replays where the model is on a GPU."""
        linears = [linear for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        ends = [*linears[-3:], model.lm_head]

        def timed(chosen: Sequence[Linear], count: int) -> float:
            x = {
                width: model.embed_tokens.new_zeros(count, width).normal_()
                for width in {linear.weight.shape[1] for linear in chosen}
            }

            def step() -> None:
                for linear in chosen:
                    linear.apply(x[linear.weight.shape[1]])

            repeats, seconds = (1000, 1.0) if count >= _LARGE else (10, 0.2)
            return time_step(step, model.device, repeats=repeats, seconds=seconds).median

        sampled = [timed(ends, min(n, _SAMPLED_ROWS)) * max(1.0, n / _SAMPLED_ROWS) for n in rows]
        return cls(rows, [timed(linears[:-3], n) for n in rows], sampled)

    def seconds(self, tokens: int, sampled: int) -> float:
        return self._at(self.layers, tokens) + self._at(self.sampled, sampled)

    def _at(self, times: Sequence[float], rows: int) -> float:
        if rows == 0:
            return 0.0
        if rows > self.rows[-1]:
            return times[-1] * rows / self.rows[-1]
        return float(np.interp(rows, self.rows, times))


def simulate(
    prompts: Sequence[int], new: Sequence[int], cap: int, batched_tokens: int, adapters: NDArray[np.int64] | None = None
) -> list[Work]:
    """The steps of a load served first come, first served: up to ``cap`` rows of ``prompts`` and ``new`` tokens at a
    time, decodes first, then prompts, chunked to ``batched_tokens`` a step.
    Adapters are always there, KV blocks always free."""
    done = np.zeros(len(prompts), np.int64)  # positions computed
    prompt, end = np.asarray(prompts), np.asarray(prompts) + np.asarray(new) - 1  # the last token is never computed
    running: list[int] = []
    waiting = 0
    steps: list[Work] = []
    while running or waiting < len(prompts):
        active = np.array(running, np.int64)
        decodes = active[done[active] >= prompt[active]]
        room = batched_tokens - len(decodes)
        chunks: list[tuple[int, int]] = []
        for row in active[done[active] < prompt[active]].tolist():
            chunks.append((row, min(room, int(prompt[row] - done[row]))))
            room -= chunks[-1][1]
        while waiting < len(prompts) and len(running) < cap and room > 0:
            running.append(waiting)
            chunks.append((waiting, min(room, int(prompt[waiting]))))
            room -= chunks[-1][1]
            waiting += 1
        rows = np.array([row for row, count in chunks if count], np.int64)
        counts = np.array([count for _, count in chunks if count], np.int64)
        pairs = counts * done[rows] + counts * (counts + 1) // 2
        done[decodes] += 1
        done[rows] += counts
        in_step = np.concatenate([decodes, rows])
        steps.append(
            Work(
                tokens=len(decodes) + int(counts.sum()),
                sampled=len(decodes) + int((done[rows] >= prompt[rows]).sum()),
                kv_tokens=int(done[in_step].sum()),
                pairs=int(pairs.sum()),
                adapters=() if adapters is None else tuple(np.unique(adapters[in_step]).tolist()),
            )
        )
        running = [row for row in running if done[row] < end[row]]
    return steps


def limit_of(
    steps: Sequence[Work],
    config: ModelConfig,
    dtype: Dtype,
    ceilings: Ceilings,
    adapter_bytes: Sequence[int],
    table: ProductTable | None = None,
    *,
    whole_last_layer: bool = False,
) -> Limit:
    """``adapter_bytes[i]``: of adapter i's weights. Products cost what their ``table`` says; without one, the larger of
    their bytes' time and their operations' (a roofline), the layers' together and the vocabulary's apart.

    Attention: the cache's bytes read once a step and row, and the operations of prefills. Adapters: the weights of
    those in the batch read once a step; their operations count for nothing. Nor do norms, activation, rotation and
    sampling. Past the last layer's attention only the sampled tokens count, as in the engine; with
    ``whole_last_layer`` all of a step's do.
    """
    size = DTYPE_BYTES[dtype]
    modules = config.lora_modules()
    layers = sum(out * into for name, (out, into) in modules.items() if ".layers." in name)
    head = config.vocab_size * config.hidden_size
    end = 0 if whole_last_layer else _end_of_last_layer(config)
    kv_bytes = config.kv_bytes_per_block(1, dtype)
    pair_flop = 4 * config.num_hidden_layers * config.q_size
    products = attention = adapters = 0.0
    for step in steps:
        if table is not None:
            products += table.seconds(step.tokens, step.sampled)
        else:
            read = layers if step.sampled else layers - end
            products += ceilings.seconds(read * size, 2 * ((layers - end) * step.tokens + end * step.sampled))
            products += ceilings.seconds(head * size, 2 * head * step.sampled) if step.sampled else 0.0
        attention += ceilings.seconds(step.kv_tokens * kv_bytes, step.pairs * pair_flop)
        adapters += ceilings.seconds(sum(adapter_bytes[i] for i in step.adapters))
    return Limit(products, attention, adapters)


def _end_of_last_layer(config: ModelConfig) -> int:
    """Weights that only the sampled tokens pass through: the last layer's after attention."""
    last = f".layers.{config.num_hidden_layers - 1}."
    modules = config.lora_modules().items()
    return sum(out * into for name, (out, into) in modules if last in name and name.rpartition(".")[2] not in _QKV)
