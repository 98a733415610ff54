"""Compiles every kernel that a job will use, before the job: FlashInfer's modules side by side, then a small engine.

The engine is the real one over one layer of the model's shape (one for each kind of attention in it), with random
weights and adapters of the job's ranks. Whatever its start and its steps compile or capture is in the cache afterwards;
no list of kernels has to be kept in step with the code.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from punica_batch_kernels.attention.types import AttentionShape
from punica_batch_kernels.prebuild import build_modules, flashinfer_modules
from safetensors.torch import save_file

from punica_batch.adapters.digest import cache_folder
from punica_batch.engine.build import assemble_engine, engine_kernels
from punica_batch.engine.engine import Engine
from punica_batch.engine.kernel_cache import KernelBuild
from punica_batch.engine.settings import EngineSettings
from punica_batch.engine.startup import EngineWarning
from punica_batch.errors import JobError
from punica_batch.models.config import ModelConfig
from punica_batch.models.weights import random_weights
from punica_batch.text.tokenizer import Tokenizer
from punica_batch.types import AdapterSpec, Request, SamplingParams

_MAX_RANKS = 8
_MAX_ADAPTERS = 64
_MAX_LORA_BYTES = 4 << 30
_STORED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # packing reads each by a kernel of its own
_NEW_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """``lengths``: tokens of each row's prompt; ``adapters``: taken in turn (None: the base model)."""

    lengths: Sequence[int]
    adapters: Sequence[str | None]


def prebuild(settings: EngineSettings, ranks: Sequence[int], targets: Sequence[str]) -> Iterator[KernelBuild]:
    """Builds for a model and device, tells of each stage as it ends. ``settings`` as a job's, but that it names no
    adapters: these are made up, of ``ranks`` (none: no adapters), on the modules ``targets`` (``q_proj`` …).

    Raises ``ModelError`` for a folder that is not usable, ``JobError`` when the engine fails its rows.
    """
    config = _few_layers(ModelConfig.from_folder(settings.model))
    dtype = getattr(torch, settings.dtype)
    if settings.device == "cuda":
        yield from _flashinfer(config, dtype, getattr(torch, settings.kv_cache_dtype))
    stages = _Stages()
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = engine_kernels(config, settings)
        notes = [str(w.message) for w in caught if issubclass(w.category, EngineWarning)]
        yield stages.end("backend", notes[0] if notes else None)
        adapters = _write_adapters(Path(root), config, ranks, targets)
        largest = max((_nbytes(adapter) for adapter in adapters.values()), default=0)
        room = max(4 * largest, min(settings.max_loras * largest, _MAX_LORA_BYTES))
        settings = replace(settings, adapters=adapters, max_lora_bytes=room or None)
        model = random_weights(config, dtype, settings.device, kernels=kernels)
        engine = assemble_engine(model, Tokenizer.load(settings.tokenizer or settings.model, settings.model), settings)
        try:
            yield stages.end("engine")
            engine.warm_up()
            yield stages.end("warm-up")
            for name, loads in (("decode", decode_loads(settings)), ("prefill", prefill_loads(settings))):
                for load in loads:
                    _run(engine, load, config.vocab_size)
                yield stages.end(f"steps of {name}")
        finally:
            engine.close()


def decode_loads(settings: EngineSettings) -> Iterator[Load]:
    """Batches of every size class up to the largest, of the popularities that choose other kernels."""
    names = list(settings.adapters)
    sizes = [1 << i for i in range(settings.max_num_seqs.bit_length()) if 1 << i < settings.max_num_seqs]
    for size in (*sizes, settings.max_num_seqs):
        few = names[: max(1, round(size**0.5))]
        for adapters in dict.fromkeys(tuple(some) for some in ([None], names[:1], few, names, [*few, None]) if some):
            yield Load([1] * size, adapters)


def prefill_loads(settings: EngineSettings) -> Iterator[Load]:
    """Steps of more and more prompt tokens, of one adapter, of several, of none."""
    names = list(settings.adapters)
    longest = longest_prompt(settings)
    for total in dict.fromkeys(min(longest, n) for n in (16, 64, 256, 512, 1024, 2048, 4096, 8192, longest)):
        for adapters in dict.fromkeys(tuple(some) for some in ([None], names[:1], [*names[:3], None]) if some):
            rows = min(len(adapters), settings.max_num_seqs, total)
            yield Load([total // rows] * rows, adapters)


def longest_prompt(settings: EngineSettings) -> int:
    """Tokens of a prompt that is computed in one step and has room for an answer."""
    return max(1, min(settings.max_num_batched_tokens, settings.max_model_len - _NEW_TOKENS - 1))


def _few_layers(config: ModelConfig) -> ModelConfig:
    windows = tuple(dict.fromkeys(config.sliding_windows))
    return replace(config, num_hidden_layers=len(windows), sliding_windows=windows)


def _flashinfer(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> Iterator[KernelBuild]:
    windows = frozenset(config.sliding_windows)
    shape = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, windows)
    try:
        modules = flashinfer_modules(shape, dtype, kv_dtype)
    except Exception as error:  # not installed, a version of another mind
        yield KernelBuild("flashinfer", 0.0, 0, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
        return
    for build in build_modules(modules):
        compiled = 0 if build.was_there or build.error is not None else 1
        yield KernelBuild(f"flashinfer {build.name}", build.seconds, compiled, build.error)


class _Stages:
    """Times stages and counts the files of compiled kernels that came in each."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._files = _compiled_files()

    def end(self, name: str, error: str | None = None) -> KernelBuild:
        now, files = time.monotonic(), _compiled_files()
        build = KernelBuild(name, now - self._began, len(files - self._files), error)
        self._began, self._files = now, files
        return build


def _compiled_files() -> set[Path]:
    """FlashInfer's and the CPU kernels' libraries, Triton's binaries."""
    folders = {cache_folder(), *(Path(os.environ[v]) for v in ("TRITON_CACHE_DIR",) if v in os.environ)}
    if "FLASHINFER_WORKSPACE_BASE" in os.environ:
        folders.add(Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / ".cache" / "flashinfer")
    found = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".so", ".cubin")}
    return {path.resolve() for path in found if not path.name.startswith(("__triton", "cuda_utils"))}


def _write_adapters(
    root: Path, config: ModelConfig, ranks: Sequence[int], targets: Sequence[str]
) -> dict[str, AdapterSpec]:
    """Adapters of each rank (of many, the largest) and stored dtype, under many names, so that a batch can have as
    many distinct ones as rows."""
    largest = sorted(set(ranks), reverse=True)[:_MAX_RANKS]
    folders: list[Path] = []
    for dtype, rank in product(_STORED_DTYPES, largest):
        folder = root / str(len(folders))
        folder.mkdir()
        tensors = {}
        for name, (out, into) in config.lora_modules().items():
            if name.rpartition(".")[2] in targets and not name.endswith("embed_tokens"):
                tensors[f"base_model.model.{name}.lora_A.weight"] = torch.full((rank, into), 1e-3, dtype=dtype)
                tensors[f"base_model.model.{name}.lora_B.weight"] = torch.full((out, rank), 1e-3, dtype=dtype)
        modules = sorted({name.split(".")[-3] for name in tensors})
        if not modules:
            return {}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        about = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": modules,
        }
        (folder / "adapter_config.json").write_text(json.dumps(about))
        folders.append(folder)
    count = _MAX_ADAPTERS if folders else 0
    return {f"a{i}": AdapterSpec(f"a{i}", str(folders[i % len(folders)])) for i in range(count)}


def _nbytes(adapter: AdapterSpec) -> int:
    """Room for its weights on the device, converted and aligned: twice what the file has is enough for any dtype."""
    return 2 * (Path(adapter.path) / "adapter_model.safetensors").stat().st_size


def _run(engine: Engine, load: Load, vocab_size: int) -> None:
    """Runs rows to their end, greedy and sampled ones in turn."""
    for row, length in enumerate(load.lengths):
        sampling = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
        if row % 2:
            sampling = replace(sampling, temperature=0.7, top_p=0.9, top_k=20)
        prompt = (np.arange(length, dtype=np.int32) + row) % vocab_size
        engine.add(Request(row, prompt, load.adapters[row % len(load.adapters)], sampling))
    while engine.has_work:
        for result in engine.step():
            if result.error is not None and not result.error.startswith("nan_logits"):  # the weights are random
                raise JobError(f"the kernels' trial run failed: {result.error}")
