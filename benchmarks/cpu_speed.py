"""The CPU speed of the product against HF + PEFT and against the bare matrix products, all in one run.

    python benchmarks/cpu_speed.py MODEL ADAPTERS [--rows 64] [--new 32] [--adapters-used 8] [--threads 2]

MODEL: a Llama-shaped folder (the figures are for SmolLM2-135M); ADAPTERS: a folder of PEFT folders, mixed ranks.
Absolute times hold only on a quiet machine; what is compared are ratios in one run. Appends a JSON line to
``benchmarks/results/cpu_speed.jsonl`` and prints the tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from punica_batch.config import JobConfig
from punica_batch.engine.build import build_engine
from punica_batch.engine.engine import Engine
from punica_batch.engine.settings import EngineSettings
from punica_batch.job.runner import run_job
from punica_batch.models.layers import Linear
from punica_batch.progress import NoProgress, Snapshot
from punica_batch.text.tokenizer import Tokenizer
from punica_batch.types import AdapterSpec, Request, SamplingParams

RESULTS = Path(__file__).parent / "results" / "cpu_speed.jsonl"


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    names = sorted(path.name for path in args.adapters.iterdir() if path.is_dir())[: args.adapters_used]
    rows = [{"prompt": _prompt(i), "lora_id": names[i % len(names)]} for i in range(args.rows)]
    bare = [{**row, "lora_id": None} for row in rows]
    engine = _engine(args, names)
    _generate(engine, args, rows[:8], new=2)  # everything warm: adapters loaded, memory touched
    with_adapters, steps = _best(lambda: _generate(engine, args, rows), args.repeat)
    without, _ = _best(lambda: _generate(engine, args, bare), args.repeat)
    products = min(_bare_products(engine, steps) for _ in range(args.repeat))
    shares = _where_time_goes(engine, args, rows)
    engine.close()
    peft = _peft(args, rows)
    first_token = _time_to_first_token(args, rows)
    tokens = args.rows * args.new
    result = {
        "what": "cpu_speed",
        "model": args.model.name,
        "rows": args.rows,
        "new_tokens": args.new,
        "adapters": len(names),
        "tok_s": tokens / with_adapters,
        "tok_s_without_adapters": tokens / without,
        "tok_s_bare_products": tokens / products,
        "tok_s_peft_mixed": peft,
        "times_peft": tokens / with_adapters / peft,
        "share_of_bound": products / with_adapters,
        "adapters_cost": with_adapters / without - 1,
        "start_to_first_token_s": first_token,
        "time_shares": shares,
        "cpu": platform.processor() or platform.machine(),
        "threads": args.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "command": " ".join(["python", "benchmarks/cpu_speed.py", "MODEL", "ADAPTERS", *sys.argv[3:]]),
    }
    _report(result)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--adapters-used", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peft-batch", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many")
    return parser.parse_args()


def _prompt(i: int) -> str:
    return (
        f"Row {i}: describe the item number {i * 37 % 101} in the catalogue, its colour, size, material and price, "
        "and say who would buy it."
    )


def _engine(args: argparse.Namespace, names: list[str]) -> Engine:
    return build_engine(
        EngineSettings(
            model=str(args.model),
            num_blocks=args.rows * 16,
            max_num_seqs=args.rows,
            max_model_len=2048,
            max_loras=len(names),
            adapters={name: AdapterSpec(name, str(args.adapters / name)) for name in names},
        )
    )


def _generate(
    engine: Engine, args: argparse.Namespace, rows: list[dict[str, Any]], new: int = 0
) -> list[tuple[int, int]]:
    """Runs ``rows`` to their end; (tokens, sampled rows) of every step."""
    tokenizer = Tokenizer.load(args.model)
    prompts = tokenizer.encode_batch([row["prompt"] for row in rows], templated=False)
    sampling = SamplingParams(max_tokens=new or args.new, ignore_eos=True)
    steps: list[tuple[int, int]] = []
    execute = engine.runner.execute

    def recorded(arrays: Any) -> Any:
        steps.append((len(arrays.input_ids), len(arrays.logits_rows)))
        return execute(arrays)

    engine.runner.execute = recorded  # type: ignore[method-assign]
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        engine.add(Request(i, prompt, row["lora_id"], sampling))
    done = 0
    while engine.has_work:
        results = engine.step()
        assert all(result.error is None for result in results), results
        done += len(results)
    engine.runner.execute = execute  # type: ignore[method-assign]
    assert done == len(rows)
    return steps


def _best(run: Callable[[], list[tuple[int, int]]], repeat: int) -> tuple[float, list[tuple[int, int]]]:
    best, steps = float("inf"), []
    for _ in range(repeat):
        start = time.perf_counter()
        steps = run()
        best = min(best, time.perf_counter() - start)
    return best, steps


def _bare_products(engine: Engine, steps: list[tuple[int, int]]) -> float:
    """Seconds that the base model's matrix products alone take for these steps, each as ``torch.nn.functional.linear``
    on the fused weights: no attention, no adapters, nothing between them."""
    model = engine.runner.model
    linears = [linear.weight for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    inputs = {
        (tokens, width): torch.randn(tokens, width)
        for tokens in {n for step in steps for n in step}
        for width in {weight.shape[1] for weight in linears}
    }
    start = time.perf_counter()
    with torch.inference_mode():
        for tokens, sampled in steps:
            for weight in linears:
                torch.nn.functional.linear(inputs[tokens, weight.shape[1]], weight)
            torch.nn.functional.linear(inputs[sampled, model.config.hidden_size], model.lm_head.weight)
    return time.perf_counter() - start


def _where_time_goes(engine: Engine, args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the wall time by part, from one run with a clock around each part (which costs a little itself)."""
    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        return wrapper

    model, runner = engine.runner.model, engine.runner
    own = model.kernels
    parts = {
        "attention": ("plan_attention", "paged_attention"),
        "adapters": ("add_lora",),
        "norms, RoPE, KV writes, activation": ("rms_norm", "rope_and_write_kv", "silu_and_mul"),
    }
    kernels = replace(own, **{name: timed(part, getattr(own, name)) for part, names in parts.items() for name in names})
    apply, add_to = (timed("base products", way) for way in (Linear.apply, Linear.add_to))
    with _patched(Linear, "apply", apply), _patched(Linear, "add_to", add_to):
        for layer in (model, *model.layers):
            layer.kernels = kernels
        execute, collect = runner.execute, runner.collect
        runner.execute = timed("model and sampling", execute)  # type: ignore[method-assign]
        runner.collect = timed("model and sampling", collect)  # type: ignore[method-assign]
        from punica_batch.engine import model_runner

        with _patched(model_runner, "sample", timed("sampling", model_runner.sample)):
            start = time.perf_counter()
            _generate(engine, args, rows)
            total = time.perf_counter() - start
        runner.execute, runner.collect = execute, collect  # type: ignore[method-assign]
        for layer in (model, *model.layers):
            layer.kernels = own
    inside = spent.pop("model and sampling")
    spent["rest of the model"] = inside - sum(spent.values())
    spent["scheduling, arrays, detokenization"] = total - inside
    return {name: seconds / total for name, seconds in sorted(spent.items(), key=lambda item: -item[1])}


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _peft(args: argparse.Namespace, rows: list[dict[str, Any]]) -> float:
    """Tokens a second of HF + PEFT, in a process of its own, the best of two runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        file.write_text(json.dumps(rows))
        script = Path(__file__).with_name("peft_baseline.py")
        command = [sys.executable, script, args.model, args.adapters, file, args.new, args.peft_batch, args.threads]
        runs = [subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True) for _ in range(2)]
    return max(float(json.loads(run.stdout.splitlines()[-1])["tok_s"]) for run in runs)


class _FirstToken(NoProgress):
    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: float | None = None

    def update(self, snapshot: Snapshot) -> None:
        if self.seconds is None and any(w.stats and w.stats.generated_tokens for w in snapshot.workers):
            self.seconds = time.perf_counter() - self.began


def _time_to_first_token(args: argparse.Namespace, rows: list[dict[str, Any]]) -> float:
    """From ``run_job`` on a Parquet file to the first token that the parent hears of (it hears four times a second)."""
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source)
        config = JobConfig(
            inputs=(source,), output=f"{folder}/out.parquet", model=str(args.model), adapters=str(args.adapters),
            max_tokens=args.new, ignore_eos=True, device="cpu", max_model_len=2048,
        )  # fmt: skip
        watch = _FirstToken()
        run_job(config, watch)
    assert watch.seconds is not None
    return watch.seconds


def _commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _report(result: dict[str, Any]) -> None:
    config_rows = [
        ("punica-batch, mixed adapters", result["tok_s"]),
        ("punica-batch, no adapters", result["tok_s_without_adapters"]),
        ("bare matrix products (the bound)", result["tok_s_bare_products"]),
        ("HF + PEFT, mixed batch", result["tok_s_peft_mixed"]),
    ]
    for name, value in config_rows:
        print(f"{name:36} {value:8.1f} new tok/s")
    print(f"\n{result['times_peft']:.2f} x HF + PEFT (wanted: 3)")
    print(f"{result['share_of_bound']:.0%} of the bound (wanted: 50 %)")
    print(f"adapters cost {result['adapters_cost']:.1%} (wanted: at most 15 %)")
    print(f"start to first token {result['start_to_first_token_s']:.1f} s (wanted: under 10)\n\nwhere the time goes")
    for name, share in result["time_shares"].items():
        print(f"  {name:36} {share:6.1%}")


if __name__ == "__main__":
    main()
