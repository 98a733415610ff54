"""Text generation with many adapters (Punica paper, figure 11): this engine against transformers with PEFT, and vLLM.

The same prompts, the same number of new tokens, greedy, EOS ignored, one model shape with random weights, in one run.
Of transformers with PEFT two ways: one mixed batch (``adapter_names``), and a loop over the adapters. vLLM takes part
where it can be imported. Each system does every task twice, and the second time counts. In that this engine and vLLM
load the adapters under new names, as they have not seen them; PEFT has all of them on the device from the start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from punica_batch.bench.device import Ceilings, ceilings, free_memory, gpu_number, open_device, synchronize
from punica_batch.bench.hf_peft import HfPeft
from punica_batch.bench.limits import limit_of, simulate
from punica_batch.bench.options import BenchOptions, Budget
from punica_batch.bench.popularity import popularity
from punica_batch.bench.record import Recorder
from punica_batch.bench.selection import Adapters
from punica_batch.bench.serving import Rows, serve
from punica_batch.bench.shapes import SHAPES
from punica_batch.bench.vllm_peer import VllmPeer, has_vllm
from punica_batch.bench.workbench import Workbench, workbench
from punica_batch.errors import JobError
from punica_batch.types import AdapterSpec

SYSTEMS = ("punica-batch", "PEFT mixed", "PEFT loop", "vLLM")


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int
    batch: int
    prompt: int
    new: int
    adapters: tuple[Adapters, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """The rows of one popularity; ``which``: the adapter number of each, None without adapters."""

    sizes: _Sizes
    adapters: Adapters
    prompts: list[NDArray[np.int32]]

    @property
    def which(self) -> list[int] | None:
        return None if self.adapters == "none" else popularity(self.adapters, self.sizes.rows).tolist()


def run(options: BenchOptions) -> None:
    """Raises ``JobError`` when a row gets too few tokens."""
    sizes = options.pick(
        full=_Sizes(32, 32, 64, 32, ("none", "identical", "skewed", "uniform", "distinct")),
        quick=_Sizes(16, 16, 64, 16, ("none", "identical", "distinct")),
        tiny=_Sizes(4, 4, 5, 3, ("none", "uniform", "distinct")),
    )
    recorder, budget = Recorder("textgen", options), options.budget()
    device = open_device(options.device)
    tasks = _tasks(sizes, options)
    _engines(recorder, tasks, device)
    free_memory(device)  # that of the model, before PEFT has its own
    dtype = getattr(torch, options.dtype)
    _peft(recorder, HfPeft(options.model_shape, dtype, device, options.rank, sizes.rows), tasks, budget)
    draw(recorder)


def _engines(recorder: Recorder, tasks: Sequence[_Task], device: torch.device) -> None:
    """This one and vLLM, with one model of random weights and one set of adapter files."""
    options = recorder.options
    with workbench(options.model_shape, dtype=options.dtype, device=device, ranks=(options.rank,)) as bench:
        _ours(recorder, bench, ceilings(device, bench.model.dtype), tasks)
        free_memory(device)
        if not has_vllm():
            print("textgen: vLLM is not installed here and takes no part", file=sys.stderr, flush=True)
        elif gpu_number(options.device):
            print(
                f"textgen: vLLM runs on the first GPU, not on {options.device}, and takes no part", file=sys.stderr,
                flush=True,
            )  # fmt: skip
        else:
            _vllm(recorder, bench, tasks)


def _tasks(sizes: _Sizes, options: BenchOptions) -> list[_Task]:
    rng, vocab = np.random.default_rng(1), SHAPES[options.model_shape]["vocab_size"]
    prompts = [rng.integers(3, vocab, sizes.prompt).astype(np.int32) for _ in range(sizes.rows)]
    return [_Task(sizes, adapters, prompts) for adapters in sizes.adapters]


def _ours(recorder: Recorder, bench: Workbench, roof: Ceilings, tasks: Sequence[_Task]) -> None:
    sizes = tasks[0].sizes
    specs = dict[str, AdapterSpec]()
    for task in tasks:
        for use in ("warm", "run"):
            specs |= bench.specs(f"{use}-{task.adapters}", sizes.rows)
    engine = bench.engine(cap=sizes.batch, longest=sizes.prompt + sizes.new, adapters=specs, distinct=sizes.rows)
    try:
        for task in tasks:
            for use in ("warm", "run"):
                which = task.which
                names: list[str | None] = [None] * sizes.rows
                if which is not None:
                    names = [f"{use}-{task.adapters}-{i}" for i in which]
                served = serve(engine, Rows(task.prompts, [sizes.new] * sizes.rows, names))
            limit = _limit(bench, roof, task, engine.settings.max_num_batched_tokens)
            _write(recorder, "punica-batch", task, served.seconds, limit)
    finally:
        engine.close()


def _limit(bench: Workbench, roof: Ceilings, task: _Task, batched_tokens: int) -> float:
    sizes, which = task.sizes, task.which
    adapters = None if which is None else np.array(which)
    steps = simulate([sizes.prompt] * sizes.rows, [sizes.new] * sizes.rows, sizes.batch, batched_tokens, adapters)
    bytes_of = [bench.adapter_bytes(i) for i in range(sizes.rows)]
    return limit_of(steps, bench.config, bench.dtype, roof, bytes_of).seconds


def _peft(recorder: Recorder, peft: HfPeft, tasks: Sequence[_Task], budget: Budget) -> None:
    device = open_device(recorder.options.device)
    runs = []
    for task in tasks:
        sizes, which = task.sizes, task.which
        runs.append(("PEFT mixed", task, partial(peft.mixed, task.prompts, which, sizes.new, sizes.batch)))
        if which is not None:
            runs.append(("PEFT loop", task, partial(peft.loop, task.prompts, which, sizes.new, sizes.batch)))
    for system, task, generate in recorder.in_time(runs, budget):
        generate()
        synchronize(device)
        began = time.perf_counter()
        answers = generate()
        seconds = time.perf_counter() - began
        if any(len(answer) != task.sizes.new for answer in answers):
            raise JobError(f"{system} did not give each row its {task.sizes.new} tokens")
        _write(recorder, system, task, seconds)


def _vllm(recorder: Recorder, bench: Workbench, tasks: Sequence[_Task]) -> None:
    sizes = tasks[0].sizes
    with VllmPeer(bench, batch=sizes.batch, longest=sizes.prompt + sizes.new) as peer:
        for i, task in enumerate(tasks):
            seconds = 0.0
            for use in (2 * i, 2 * i + 1):  # not measured; measured
                which = None if task.which is None else [number + use * sizes.rows for number in task.which]
                began = time.perf_counter()
                peer.generate(task.prompts, which, sizes.new)
                seconds = time.perf_counter() - began
            _write(recorder, "vLLM", task, seconds)


def _write(recorder: Recorder, system: str, task: _Task, seconds: float, limit: float | None = None) -> None:
    sizes = task.sizes
    tokens = sizes.rows * sizes.new
    line = recorder.write(
        "throughput", "new tok/s", tokens / seconds, limit=None if limit is None else tokens / limit, headline=True,
        system=system, adapters=task.adapters, rows=sizes.rows, batch=sizes.batch, prompt=sizes.prompt, new=sizes.new,
    )  # fmt: skip
    ours = recorder.select("throughput", system="punica-batch", adapters=task.adapters)
    if ours and system != "punica-batch":
        recorder.write("speedup", "times", ours[0]["median"] / line["median"], against=system, adapters=task.adapters)


def draw(recorder: Recorder) -> None:
    """Bars by popularity and system, on a logarithmic axis; this engine's limit above."""
    from punica_batch.bench.figure import figure, finish

    lines = recorder.select("throughput")
    kinds = list(dict.fromkeys(line["parameters"]["adapters"] for line in lines))
    systems = [s for s in SYSTEMS if recorder.select("throughput", system=s)]
    with figure(recorder, "Text generation with LoRA adapters") as (axes,):
        width = 0.8 / max(1, len(systems))
        for i, system in enumerate(systems):
            points = [
                (kinds.index(x["parameters"]["adapters"]), x["median"])
                for x in recorder.select("throughput", system=system)
            ]
            axes.bar([at + i * width for at, _ in points], [value for _, value in points], width, label=system)
        limits = [(kinds.index(x["parameters"]["adapters"]), x["limit"]) for x in lines if x["limit"] is not None]
        axes.scatter(
            [at for at, _ in limits],
            [value for _, value in limits],
            marker="_",
            color="black",
            label="limit, part after part",
        )
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set_yscale("log")
        finish(axes, "", "adapters", "new tokens a second")
