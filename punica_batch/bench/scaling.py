"""A whole job on one GPU and on two: ``punica-batch run`` over the decode load, as many rows for each GPU.

Everything counts, from the command's start to the end of the output: Parquet, tokenization, start-up, committing. Both
jobs begin with the same start-up and give a GPU the same rows, so that their rates may be compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from punica_batch.bench.device import free_memory, gpu_number, open_device
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import load
from punica_batch.bench.record import Recorder
from punica_batch.bench.shapes import SHAPES
from punica_batch.bench.workbench import memory_folder, write_adapters, write_tokenizer
from punica_batch.errors import JobError, UsageError
from punica_batch.models.config import ModelConfig
from punica_batch.models.weights import random_weights
from punica_batch.types import JsonDict

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TIMEOUT = 1800


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int  # a GPU
    longest: int
    max_num_seqs: int


def run(options: BenchOptions) -> None:
    """On the CPU: one worker process and two. Raises ``JobError`` when a job fails, ``UsageError`` for a GPU other than
    the first."""
    if gpu_number(options.device):
        raise UsageError(
            f"bench scaling runs jobs on the first GPU and on the first two: leave out --device {options.device}, or "
            "put another GPU first in CUDA_VISIBLE_DEVICES"
        )
    sizes = options.pick(full=_Sizes(4096, 512, 256), quick=_Sizes(512, 512, 256), tiny=_Sizes(6, 24, 4))
    recorder = Recorder("scaling", options)
    device = open_device(options.device)
    config = ModelConfig.from_dict(SHAPES[options.model_shape])
    size = config.weight_bytes(options.dtype)
    counts = [n for n in (1, 2) if device.type == "cpu" or n <= torch.cuda.device_count()]
    with tempfile.TemporaryDirectory(dir=memory_folder(size)) as root:
        folder = Path(root)
        write_model(folder, options, config, device)
        free_memory(device)  # the workers' from now on
        for count in counts:
            tokens = write_rows(folder / f"rows-{count}.parquet", sizes.rows, sizes.longest, count)
            rate = tokens / (seconds := _run_job(folder, options, sizes, count))
            about: JsonDict = {"workers": count, "rows": sizes.rows * count, "start_and_all_s": round(seconds, 2)}
            recorder.write("whole job", "new tok/s", rate, headline=True, **about)
            one = recorder.select("whole job", workers=1)
            if count > 1:
                recorder.write("speedup", "times", rate / one[0]["median"], limit=count, headline=True, **about)
    draw(recorder)


def write_model(folder: Path, options: BenchOptions, config: ModelConfig, device: torch.device) -> None:
    """``folder / "model"`` of random weights with a tokenizer, and ``folder / "adapters"`` for it."""
    (folder / "model").mkdir()
    (folder / "adapters").mkdir()
    model = random_weights(config, getattr(torch, options.dtype), device)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in model.named_tensors().items()}
    save_file(tensors, folder / "model" / "model.safetensors", {"format": "pt"})
    (folder / "model" / "config.json").write_text(json.dumps(SHAPES[options.model_shape]))
    write_tokenizer(folder / "model", config.vocab_size)
    write_adapters(folder / "adapters", config, [options.rank], options.dtype, device)


def write_rows(path: Path, rows: int, longest: int, times: int) -> int:
    """The decode load's lengths as text: each letter is one token of ``write_tokenizer``'s. All rows ``times`` over,
    the adapters in turn. Returns how many new tokens they come to."""
    prompts, new = load("decode", rows, longest)
    rng = np.random.default_rng(1)
    texts = ["".join(rng.choice(list(LETTERS), len(prompt))) for prompt in prompts]
    names = [f"adapter{i % 8}" for i in range(rows)]
    columns: dict[str, Sequence[Any]] = {"prompt": texts, "lora_id": names, "max_tokens": new}
    pq.write_table(pa.table({name: [*values] * times for name, values in columns.items()}), path)
    return sum(new) * times


def _run_job(folder: Path, options: BenchOptions, sizes: _Sizes, count: int) -> float:
    """The command's seconds."""
    where = ["--device", "cpu", "--workers", str(count)] if options.device == "cpu" else ["--gpus", str(count)]
    command = [
        sys.executable, "-m", "punica_batch", "run", str(folder / f"rows-{count}.parquet"), "--json", "--quiet",
        "--model", str(folder / "model"), "--adapters", str(folder / "adapters"), "--dtype", options.dtype,
        "--output", str(folder / f"out-{count}.parquet"), "--ignore-eos",
        "--max-num-seqs", str(sizes.max_num_seqs), "--max-model-len", str(sizes.longest + 2), *where,
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise JobError(f"the job on {count} devices ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    summary: JsonDict = json.loads(done.stdout)
    if summary["rows_error"] or summary["rows"] != sizes.rows * count:
        raise JobError(f"of the job's {sizes.rows * count} rows {summary['rows_error']} failed")
    return seconds


def draw(recorder: Recorder) -> None:
    """Rates by number of workers, and what one's rate times the number would be."""
    from punica_batch.bench.figure import figure, finish

    lines = recorder.select("whole job")
    counts = [line["parameters"]["workers"] for line in lines]
    with figure(recorder, "A whole job by number of workers") as (axes,):
        axes.bar(counts, [line["median"] for line in lines], 0.5)
        ideal = [lines[0]["median"] * count for count in counts]
        axes.scatter(counts, ideal, marker="_", color="black", label="one worker's rate times their number")
        axes.set_xticks(counts)
        finish(axes, "", "workers", "new tokens a second")
