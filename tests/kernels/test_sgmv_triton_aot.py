"""Every Triton SGMV kernel compiles for an A100 and an H100, and fits their shared memory; that needs no GPU."""

# ruff: noqa: E402 (what needs Triton is imported once it is known to be there)

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
from punica_batch_kernels.sgmv import triton_backend
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, RowTiles
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotTable
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
A100_SHARED_MEMORY = 163 * 1024  # of one block, the smaller of the two
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

pytestmark = [
    pytest.mark.skipif(
        not (PTXAS.exists() or "TRITON_PTXAS_PATH" in os.environ or shutil.which("ptxas")),
        reason="needs ptxas, which assembles for the GPU",
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]


class Recorder:
    """Stands for a kernel and keeps what it was launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def compile_for(capability: int, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the just-in-time compiler would for this launch."""
    fixed = {p.name for p in kernel.params if p.do_not_specialize}
    signature, attributes = {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        aligned = isinstance(value, torch.Tensor) or (value % 16 == 0 and name not in fixed)
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    signature |= dict.fromkeys(constants, "constexpr")
    options = {name: value for name, value in kwargs.items() if name in OPTIONS}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "max_rank"), [(torch.float16, 16), (torch.bfloat16, 128), (torch.float32, 256)], ids=str
)
@pytest.mark.parametrize(("block_m", "num_tiles"), [(PER_ROW, 32), (PER_ROW, 256), (GROUPED, 16), (PREFILL, 64)])
def test_compiles_within_shared_memory(
    block_m: int, num_tiles: int, dtype: torch.dtype, max_rank: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped Q/K/V of an 8B model, of which K and V are narrower."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("shrink_kernel", "expand_kernel"):
        monkeypatch.setattr(triton_backend, name, Recorder(getattr(triton_backend, name), launches))
    monkeypatch.setattr(triton_backend, "_has_pdl", lambda device: capability >= 90)
    group = LoraGroup(4096, (0, 4096, 5120, 6144), [None])
    group.table = SlotTable(torch.zeros(1, 8, dtype=torch.int64), max_rank, dtype)
    tiles = RowTiles(torch.zeros(num_tiles, 4, dtype=torch.int32), block_m)
    segments = Segments(torch.empty(0), torch.empty(0), (0,), (), (tiles,))
    x, y = torch.empty(num_tiles, 4096, dtype=dtype), torch.empty(num_tiles, 6144, dtype=dtype)
    triton_backend.add_lora(y, x, group, segments)
    assert len(launches) == 2
    for kernel, args, kwargs in launches:
        compiled = compile_for(capability, kernel, args, kwargs)
        assert compiled.metadata.shared <= A100_SHARED_MEMORY
        text = compiled.asm["ptx"]
        assert ("griddepcontrol" in text) == (capability >= 90), "what only Hopper has is guarded"
        assert ("mma" in text) == (block_m != PER_ROW and dtype != torch.float32), "one row takes no tensor cores"
        if dtype != torch.float32:
            assert "ld.global.b16" not in text.replace("::", "."), "weights and activations load 16 bytes at a time"
