"""Compiles FlashInfer's modules side by side, before an engine would one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from punica_batch_kernels.attention import flashinfer_backend as attention
from punica_batch_kernels.attention.types import AttentionShape

_CORES_A_MODULE = 2  # a module has two slow files at most; the compiler takes a gigabyte or two for each


@dataclass(frozen=True, slots=True)
class ModuleBuild:
    """``was_there``: it had been compiled before; ``seconds`` from the start of its build to its end."""

    name: str
    seconds: float
    was_there: bool
    error: str | None = None


def flashinfer_modules(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[tuple[str, Any]]:
    """(name, FlashInfer's ``JitSpec``) of each module that the attention and elementwise backends use for such a model
    and KV cache, slowest first; none where they use torch. The arguments are those that FlashInfer's wrappers derive
    from what the backends plan.

    Raises whatever importing FlashInfer raises.
    """
    if dtype not in attention.DTYPES:
        return []
    from flashinfer import jit
    from flashinfer.jit.norm import gen_norm_module

    modules: list[tuple[str, Any]] = [("norm", gen_norm_module())]
    if attention.unsupported(shape, dtype, kv_dtype) is None:
        modules = _attention_modules(shape, dtype) + modules
    return [*modules, ("silu_and_mul", jit.gen_act_and_mul_module("silu"))]


def _attention_modules(shape: AttentionShape, dtype: torch.dtype) -> list[tuple[str, Any]]:
    from flashinfer import jit

    modules: list[tuple[str, Any]] = []
    backends = dict.fromkeys((attention.prefill_backend(torch.device("cuda"), dtype), "fa2"))
    tensor_cores = shape.num_heads // shape.num_kv_heads >= attention.TENSOR_CORE_GROUP
    for window in sorted({window is not None for window in shape.windows}):
        # q, k and v, output; indices; head sizes; no position encoding; sliding window; no soft cap
        common = (dtype, dtype, dtype, torch.int32, shape.head_dim, shape.head_dim, 0, window, False)
        suffix = " (sliding window)" if window else ""
        modules += [(f"prefill {b}{suffix}", jit.gen_batch_prefill_module(b, *common, False)) for b in backends]
        if not tensor_cores:  # else decode runs the prefill kernel
            modules.append((f"decode{suffix}", jit.gen_batch_decode_module(*common)))
    return modules


def build_missing(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Compiles what the backends would one after the other when they are made. What fails they find out, and say."""
    try:
        modules = flashinfer_modules(shape, dtype, kv_dtype)
    except Exception:  # not installed, or of another mind
        return
    for _ in build_modules([(name, spec) for name, spec in modules if not spec.is_compiled]):
        pass


def build_modules(modules: list[tuple[str, Any]]) -> Iterator[ModuleBuild]:
    """Builds them on threads (each waits for a compiler process) and tells of each as it ends. One that fails does not
    keep the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(len(modules), cores // _CORES_A_MODULE))
    with ThreadPoolExecutor(threads, thread_name_prefix="kernel-build") as pool:
        for future in as_completed([pool.submit(_build, name, spec) for name, spec in modules]):
            yield future.result()


def _build(name: str, spec: Any) -> ModuleBuild:
    was_there = bool(spec.is_compiled)
    seconds = _timer()
    if spec.is_aot:  # shipped compiled, in the package flashinfer-jit-cache
        return ModuleBuild(name, 0.0, True)
    try:
        spec.build(verbose=False)  # ninja: does nothing where all is up to date
    except Exception as error:  # the compiler's complaint, or no compiler: the engine then does without
        return ModuleBuild(name, seconds(), was_there, _reason(error))
    return ModuleBuild(name, seconds(), was_there)


def _reason(error: Exception) -> str:
    """The first line that names an error: ninja's output begins with the command."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "error:" in line or "cannot find" in line), None)
    return f"{type(error).__name__}: {(told or (lines or [''])[0])[:300]}"


def _timer() -> Callable[[], float]:
    began = time.monotonic()
    return lambda: time.monotonic() - began
