"""An engine over a runner that computes nothing: each row's tokens are written beforehand."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from letters import letters
from punica_batch_kernels.sgmv.types import LoraGroup

from punica_batch.engine.engine import Engine
from punica_batch.engine.lora_pack import PackedAdapter
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.model_runner import SampledTokens
from punica_batch.engine.rows import Endings
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import AdapterError
from punica_batch.models.lora import ModelLora
from punica_batch.scheduler.batch import BatchArrays
from punica_batch.types import AdapterSpec, Request, RowResult, SamplingParams

EOS = 9


@pytest.fixture(autouse=True, params=[0, 1], ids=["at once", "a step ahead"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every test of a file that imports this runs both ways."""
    ahead = int(request.param)
    monkeypatch.setattr(sys.modules[__name__], "Engine", functools.partial(Engine, steps_ahead=ahead))
    return ahead


class ScriptedRunner:
    """Row r's sample s gets the tokens of ``script(r, s)``, one by one; None stands for NaN logits."""

    def __init__(self, script: Callable[[int, int], list[int | None]], slots: Callable[[str], int]) -> None:
        self.script = script
        self.slots = slots
        self.batches: list[list[tuple[int, int]]] = []

    def execute(self, arrays: BatchArrays) -> SampledTokens:
        self.batches.append([(s.request.row, s.sample) for s in arrays.sequences])
        for lora_id in arrays.segment_lora_ids:
            assert lora_id is None or self.slots(lora_id) >= 0
        # one more token than scripted: what is computed of a row before its end is known
        tokens = [[*self.script(s.request.row, s.sample), 17][s.num_output_tokens] for s in arrays.sampled]
        return SampledTokens([t or 0 for t in tokens], [t is not None for t in tokens], {})

    def collect(self, step: SampledTokens) -> SampledTokens:
        return step


def make(
    script: Callable[[int, int], list[int | None]] = lambda row, sample: [1] * 100,
    load: Callable[[str], PackedAdapter] | None = None,
    **options: Any,
) -> Engine:
    defaults = {
        "num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 40,
        "max_loras": 2, "adapters": {name: AdapterSpec(name, f"/adapters/{name}") for name in ("a", "b", "bad", "c")},
    }  # fmt: skip
    settings = EngineSettings(model="model", **defaults | options)
    loras = settings.max_loras
    model_lora = ModelLora([], LoraGroup(1, (0, 1), [None] * loras), [None] * loras)
    store = LoraStore(model_lora, load or packed, max_loras=loras, read_ahead=settings.read_ahead)
    endings = Endings(letters(), frozenset({EOS, 20}), settings.max_model_len)
    return Engine(ScriptedRunner(script, store.slot), store, endings, settings)  # type: ignore[arg-type]


def packed(lora_id: str) -> PackedAdapter:
    if lora_id == "bad":
        raise AdapterError("adapter 'bad': no such file")
    return PackedAdapter(f"sha-{lora_id}", torch.zeros(0), (None,), None)


def row(number: int, length: int = 3, lora_id: str | None = None, **sampling: Any) -> Request:
    return Request(number, np.zeros(length, np.int32), lora_id, SamplingParams(**{"max_tokens": 5} | sampling))


def run(engine: Engine, *requests: Request) -> dict[int, RowResult]:
    for request in requests:
        engine.add(request)
    results: dict[int, RowResult] = {}
    while engine.has_work:
        for result in engine.step():
            assert result.row not in results
            results[result.row] = result
        engine.check_integrity()
    return results
