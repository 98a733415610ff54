"""Makes everything in this folder: ``python sample_data/make.py --out sample_data`` (see README.md).

``--quick`` goes through all the steps in about a minute and leaves an untrained, useless model.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import training
from messages import PROMPT, draw_message
from tasks import TASKS, Task, task_named

HELD_OUT_ROWS = 50  # for each adapter
REQUEST_ROWS = 30  # for each adapter
BASE_ROWS = 16
FIRST_MOMENT = datetime.datetime(2024, 3, 4, 8, 0, tzinfo=datetime.UTC)

JOB_FILE = """\
# Read by `punica-batch run sample_data/requests.parquet`, since it lies beside the input. Paths are relative to it.
model = "model"
adapters = "adapters.toml"
max_tokens = 48
"""


def draw_rows(task: Task, count: int, rng: random.Random) -> list[tuple[str, str | None, str | None]]:
    """(prompt, lora_id, expected) of held-out messages, the classes in turn."""
    rows = []
    for number in range(count):
        label = task.labels[number % len(task.labels)] if task.labels else None
        message, answer = task.example(rng, held_out=True, label=label)
        rows.append((message, task.name, answer))
    return rows


def draw_base_rows(count: int, rng: random.Random) -> list[tuple[str, str | None, str | None]]:
    """Rows for the base model, which has no prompt template of its own in the registry."""
    return [(PROMPT.format(prompt=draw_message(rng).text), None, None) for _ in range(count)]


def rows_table(rows: Sequence[tuple[str, str | None, str | None]], prefix: str) -> pa.Table:
    prompts, lora_ids, expected = zip(*rows, strict=True)
    return pa.table(
        {
            "id": [f"{prefix}-{number:04d}" for number in range(1, len(rows) + 1)],
            "prompt": pa.array(prompts, pa.string()),
            "lora_id": pa.array(lora_ids, pa.string()).dictionary_encode(),
            "expected": pa.array(expected, pa.string()),
        }
    )


def write_rows(out: Path, seed: int) -> None:
    rng = random.Random(f"rows-{seed}")
    held_out = [row for task in TASKS for row in draw_rows(task, HELD_OUT_ROWS, rng)]
    pq.write_table(rows_table(held_out, "held-out"), out / "heldout.parquet")
    requests = [row for task in TASKS for row in draw_rows(task, REQUEST_ROWS, rng)] + draw_base_rows(BASE_ROWS, rng)
    rng.shuffle(requests)
    table = rows_table(requests, "req")
    moment, moments = FIRST_MOMENT, []
    for _ in requests:
        moment += datetime.timedelta(seconds=rng.randint(20, 900))
        moments.append(moment)
    table = table.append_column("received_at", pa.array(moments, pa.timestamp("us", tz="UTC")))
    channels = [rng.choice(("email", "chat", "form")) for _ in requests]
    pq.write_table(table.append_column("channel", pa.array(channels, pa.string())), out / "requests.parquet")


def write_registry(out: Path) -> None:
    """``adapters.toml``: every adapter with the same prompt template, and what its answers may be."""
    template = PROMPT.replace("\n", "\\n")
    entries = ["# Which adapters there are and how their rows are asked. Paths are relative to this file.\n"]
    for task in TASKS:
        lines = [f"[adapters.{task.name}]", f'path = "adapters/{task.name}"', f'prompt_template = "{template}"']
        if task.labels:
            lines.append("labels = [" + ", ".join(f'"{label}"' for label in task.labels) + "]")
        entries.append("\n".join([*lines, f"max_tokens = {task.max_tokens}"]) + "\n")
    (out / "adapters.toml").write_text("\n".join(entries), encoding="utf-8")
    (out / "punica-batch.toml").write_text(JOB_FILE, encoding="utf-8")


def train_adapters(names: Sequence[str], arguments: Sequence[str], jobs: int) -> None:
    """A process for each adapter, ``jobs`` at a time (one small model leaves most of a GPU idle)."""
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            command = [sys.executable, __file__, *arguments, "--adapter", name]
            threads = {"OMP_NUM_THREADS": "1"} if jobs > 1 else {}
            running[name] = subprocess.Popen(command, env=os.environ | threads)
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode:
                    raise SystemExit(f"training the adapter {name} failed")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--jobs", type=int, help="adapters trained side by side (default: 8 on cuda, 1 on cpu)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to try the script")
    parser.add_argument("--skip-base", action="store_true", help="keep the base model that is in --out")
    parser.add_argument("--adapter", help="train this adapter alone, on the base model that is in --out")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    out, quick = arguments.out, arguments.quick
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.adapter:
        task = task_named(arguments.adapter)
        training.train_adapter(
            task, out / "model", out / "adapters" / task.name, seed=arguments.seed, device=device,
            examples=200 if quick else 40_000, steps=6 if quick else None, batch=8 if quick else 128,
        )  # fmt: skip
        return
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out, arguments.seed)
    write_registry(out)
    began = time.monotonic()
    if not arguments.skip_base:
        training.train_base(
            out / "model", seed=arguments.seed, device=device, vocab_size=2048,
            documents=3000 if quick else 240_000, steps=10 if quick else 4500, batch=4 if quick else 128,
        )  # fmt: skip
        print(f"base model: {time.monotonic() - began:.0f} s", flush=True)
    passed_on = ["--out", str(out), "--seed", str(arguments.seed), "--device", device] + ["--quick"] * quick
    train_adapters([task.name for task in TASKS], passed_on, arguments.jobs or (8 if device == "cuda" else 1))
    print(f"all: {time.monotonic() - began:.0f} s on {device}", flush=True)


if __name__ == "__main__":
    main()
