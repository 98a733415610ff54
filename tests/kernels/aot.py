"""Kernels compiled ahead of time, for GPUs that are not there. A file that imports this before what needs Triton is
skipped where Triton is not installed.
"""

# ruff: noqa: E402 (what needs Triton is imported once it is known to be there)

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.bool: "*i1", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
A100_SHARED_MEMORY = 163 * 1024  # of one block; an H100's is larger
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

NEEDS_COMPILER = [
    pytest.mark.skipif(
        not (PTXAS.exists() or "TRITON_PTXAS_PATH" in os.environ or shutil.which("ptxas")),
        reason="needs ptxas, which assembles for the GPU",
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel, its arguments, and by name its constants and options."""


def compile_for(capability: int, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the just-in-time compiler would for this launch."""
    fixed = {p.name for p in kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    signature, attributes = {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        is_tensor = isinstance(value, torch.Tensor)
        number = "fp32" if isinstance(value, float) else "i32"
        signature[name] = POINTERS[value.dtype] if is_tensor else number
        if name not in fixed and (is_tensor or (isinstance(value, int) and value % 16 == 0)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    options = {name: value for name, value in kwargs.items() if name in OPTIONS}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
