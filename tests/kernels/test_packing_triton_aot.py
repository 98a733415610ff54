"""The repacking kernel compiles for an A100 and an H100, with vector loads where alignment allows; without a GPU."""

# ruff: noqa: E402 (what needs Triton is imported once it is known to be there)

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
from punica_batch_kernels.packing.triton_backend import repack_kernel
from punica_batch_kernels.packing.types import FIELDS, TILE
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
pytestmark = [
    pytest.mark.skipif(
        not (PTXAS.exists() or "TRITON_PTXAS_PATH" in os.environ or shutil.which("ptxas")),
        reason="needs ptxas, which assembles for the GPU",
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("vector", [1, 8])
@pytest.mark.parametrize("block_ranks", [16, 64])
@pytest.mark.parametrize(
    ("packed", "stored"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_compiles(packed: torch.dtype, stored: torch.dtype, block_ranks: int, vector: int, capability: int) -> None:
    pointers = (f"*{TYPES[packed]}", f"*{TYPES[stored]}", "*i64", "*fp32", "*i32")
    signature = dict(zip(repack_kernel.arg_names, pointers, strict=False))
    constants = {"FIELDS": FIELDS, "BLOCK": TILE, "BLOCK_RANKS": block_ranks, "VECTOR": vector}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(repack_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 48 * 1024
    wide = re.findall(r"(?:ld|st)\.global\S*\.v4", compiled.asm["ptx"].replace("::", "."))
    assert bool(wide) == (vector == 8), "16 bytes at a time where everything is aligned to them"
