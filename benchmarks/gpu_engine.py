"""New tokens a second of the engine on one GPU: Llama-2-7B's shape, fp16, random weights, rank-16 adapters.

    python benchmarks/gpu_engine.py [--caps 32 256] [--kinds none identical uniform distinct] [--seconds 12]

The load: prompt lengths lognormal(0.8, 1.0) x 18, clipped to [2, 256]; lengths in all uniform in [0, 512), raised to
prompt + 2; 256 rows at a batch cap of 32, 1,024 at 256; EOS ignored, so each row has exactly its number of new tokens.
Adapters (on all seven projections): one ("identical"), ceil(sqrt rows) of them round robin ("uniform"), or one a row
("distinct": eight folders under as many names as rows, each name loaded on its own). Loading counts. A run ends with
the load or after ``--seconds``; one like it before warms up and does not count.

Some later steps are profiled: what the device did in them, by kind of kernel, and how much of an unprofiled step of
the same run's time that is; the rest is the host's.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from punica_batch.engine.build import assemble_engine, engine_kernels
from punica_batch.engine.engine import Engine
from punica_batch.engine.settings import EngineSettings
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.weights import random_weights
from punica_batch.text.tokenizer import Tokenizer
from punica_batch.types import AdapterSpec, Request, SamplingParams

SEED = 0xABCDABCD987
ROWS = {32: 256, 256: 1024}
LONGEST = 512
VOCAB = 32000
FOLDERS = 8
RANK = 16
CONFIG = ModelConfig.from_dict({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 10000.0, "torch_dtype": "float16",
})  # fmt: skip
# part of a kernel's name -> what it does; the first that fits counts
KERNELS = {
    "add-on": ("shrink_kernel", "expand_kernel"),
    "attention": ("BatchDecode", "BatchPrefill", "PersistentVariableLength", "VariableLengthMerge", "flash", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "splitK", "gemv", "cublas"),
    "copies": ("Memcpy", "Memset"),
}


def decode_load(rows: int) -> tuple[list[np.ndarray], list[int]]:
    """Prompts and the number of new tokens of each row."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    prompt = np.clip(rng.lognormal(0.8, 1.0, rows) * 18, 2, LONGEST // 2).astype(int)
    new = np.maximum(rng.integers(0, LONGEST, rows), prompt + 2) - prompt
    return [rng.integers(3, VOCAB, int(n)).astype(np.int32) for n in prompt], new.astype(int).tolist()


def adapters_of(kind: str, rows: int) -> list[str | None]:
    """The adapter of each row."""
    if kind == "none":
        return [None] * rows
    count = {"identical": 1, "uniform": math.ceil(math.sqrt(rows)), "distinct": rows}[kind]
    return [f"a{i % count}" for i in range(rows)]


def write_adapters(root: Path) -> list[Path]:
    generator = torch.Generator(device="cuda").manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.float16, device="cuda").normal_(0, 0.02, generator=generator)

    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": []}
    folders = []
    for i in range(FOLDERS):
        folder = root / f"adapter{i}"
        folder.mkdir()
        tensors, targets = {}, set()
        for name, (out, into) in CONFIG.lora_modules().items():
            if ".layers." in name:
                targets.add(name.rpartition(".")[2])
                tensors[f"base_model.model.{name}.lora_A.weight"] = matrix(RANK, into).cpu()
                tensors[f"base_model.model.{name}.lora_B.weight"] = matrix(out, RANK).cpu()
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": sorted(targets)}))
        folders.append(folder)
    return folders


def write_tokenizer(folder: Path) -> Tokenizer:
    """A vocabulary of the right size, so that rows' ids become text as in a job."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(a + b for a in letters for b in letters)][:VOCAB]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer.load(folder)


def settings_of(cap: int, adapters: list[str | None], folders: list[Path]) -> EngineSettings:
    names = [name for name in dict.fromkeys(adapters) if name is not None]
    return EngineSettings(
        model="random", dtype="float16", kv_cache_dtype="float16", device="cuda",
        num_blocks=cap * LONGEST // 16, max_num_seqs=cap, max_num_batched_tokens=2048, max_model_len=LONGEST + 2,
        max_loras=max(1, min(cap, len(names))), max_lora_rank=RANK,
        adapters={name: AdapterSpec(name, str(folders[i % FOLDERS])) for i, name in enumerate(names)},
    )  # fmt: skip


def run(
    model: LlamaModel, tokenizer: Tokenizer, kind: str, cap: int, folders: list[Path], seconds: float
) -> dict[str, Any]:
    """One load from its start; what it came to."""
    prompts, new = decode_load(ROWS[cap])
    adapters = adapters_of(kind, len(prompts))
    engine = assemble_engine(model, tokenizer, settings_of(cap, adapters, folders))
    for row, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=new[row], ignore_eos=True)
        engine.add(Request(row, prompt, adapters[row], params))
    torch.cuda.synchronize()
    began, steps, finished = time.perf_counter(), list[float](), 0
    while engine.has_work and time.perf_counter() - began < seconds:
        at = time.perf_counter()
        results = engine.step()
        steps.append(time.perf_counter() - at)
        for result in results:
            assert result.error is None, result.error
            assert len(result.completions[0].token_ids) == new[result.row]
        finished += len(results)
    took = time.perf_counter() - began
    stats = engine.stats()
    line = {
        "cap": cap, "adapters": kind, "new_tok_s": round(stats.generated_tokens / took, 1), "seconds": round(took, 2),
        "new_tokens": stats.generated_tokens, "rows_done": finished, "rows": len(prompts),
        "whole_load": not engine.has_work, "steps": stats.steps,
        "adapters_loaded": sum(engine.lora_store.sha256(name) is not None for name in {*adapters}),
        "step_ms_median": round(1000 * statistics.median(steps), 2), "preemptions": stats.preemptions,
    }  # fmt: skip
    if engine.has_work:
        line |= profile(engine)
    engine.close()
    return line


def profile(engine: Engine, count: int = 8) -> dict[str, Any]:
    """Device time of a step by kind of kernel, ms, over ``count`` steps; of as many before them, the time in all."""
    took, rows = [], []
    for _ in range(count):
        began = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - began)
        rows.append(engine.stats().running)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
    device: dict[str, float] = {}
    kernels = 0
    for event in profiler.key_averages():
        if not event.self_device_time_total:  # the host's side of a launch
            continue
        kind = next((k for k, parts in KERNELS.items() if any(part in event.key for part in parts)), "others")
        device[kind] = device.get(kind, 0.0) + event.self_device_time_total / 1000 / count
        kernels += event.count
    step, busy = 1000 * statistics.median(took), sum(device.values())
    return {
        "profiled_rows": rows[0], "step_ms": round(step, 2), "device_ms": {k: round(v, 2) for k, v in device.items()},
        "device_ms_sum": round(busy, 2), "host_share": round(max(0.0, 1 - busy / step), 3),
        "kernels_a_step": round(kernels / count),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", type=int, nargs="+", default=[32, 256], choices=sorted(ROWS))
    parser.add_argument("--kinds", nargs="+", default=["none", "identical", "uniform", "distinct"])
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--warmup", type=float, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_engine.jsonl")
    options = parser.parse_args()
    about = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "command": " ".join(sys.argv), "shape": "llama-2-7b fp16", "rank": RANK,
    }  # fmt: skip
    memory = Path("/dev/shm")  # adapter files as a page cache would give them
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as root:
        folders, tokenizer = write_adapters(Path(root)), write_tokenizer(Path(root))
        kernels = engine_kernels(CONFIG, settings_of(32, [], folders))
        model = random_weights(CONFIG, torch.float16, "cuda", kernels=kernels)
        for cap in options.caps:
            for kind in options.kinds:
                for seconds in (options.warmup, options.seconds):
                    line = about | {"note": kernels.note}
                    line |= run(model, tokenizer, kind, cap, folders, seconds)
                    gc.collect()  # the engine's cache, before the next one's
                    torch.cuda.empty_cache()
                print(json.dumps({k: v for k, v in line.items() if k not in about}), flush=True)
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
