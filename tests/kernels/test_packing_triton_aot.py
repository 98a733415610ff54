"""The repacking kernel compiles for an A100 and an H100, with vector loads where alignment allows; without a GPU."""

from __future__ import annotations

import re

import pytest
import torch
from aot import NEEDS_COMPILER, compile_for
from punica_batch_kernels.packing.triton_backend import repack_kernel
from punica_batch_kernels.packing.types import FIELDS, TILE

pytestmark = NEEDS_COMPILER


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
    dtypes = (packed, stored, torch.int64, torch.float32, torch.int32)
    constants = {"FIELDS": FIELDS, "BLOCK": TILE, "BLOCK_RANKS": block_ranks, "VECTOR": vector}
    tensors = tuple(torch.empty(0, dtype=dtype) for dtype in dtypes)
    compiled = compile_for(capability, repack_kernel, tensors, constants | {"num_warps": 4})
    assert compiled.metadata.shared <= 48 * 1024
    wide = re.findall(r"(?:ld|st)\.global\S*\.v4", compiled.asm["ptx"].replace("::", "."))
    assert bool(wide) == (vector == 8), "16 bytes at a time where everything is aligned to them"
