"""Every Triton SGMV kernel compiles for an A100 and an H100, and fits their shared memory; that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from aot import A100_SHARED_MEMORY, NEEDS_COMPILER, Launch, compile_for
from punica_batch_kernels.elementwise.types import QKNorm, Rotation
from punica_batch_kernels.sgmv import fused, triton_backend
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, RowTiles
from punica_batch_kernels.sgmv.triton_config import Config, load_table
from punica_batch_kernels.sgmv.triton_expand import expand_kernel
from punica_batch_kernels.sgmv.triton_shrink import shrink_kernel
from punica_batch_kernels.sgmv.tuned import FOLDER
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotTable

pytestmark = NEEDS_COMPILER


def recorder(kernel: Any, launches: list[Launch]) -> Callable[..., None]:
    """Stands for a kernel's launcher and keeps what it was launched with."""

    def launch(key: object, programs: int, tensors: Any, numbers: Any, options: Callable[[], dict[str, Any]]) -> None:
        launches.append((kernel, (*tensors, *numbers), options()))

    return launch


def launches_of(
    group: LoraGroup, block_m: int, num_tiles: int, capability: int, config: Config | None, monkeypatch: Any
) -> list[Launch]:
    """What ``add_lora`` launches for as many tiles; all dimensions but the tiles' are the group's."""
    launches: list[Launch] = []
    monkeypatch.setattr(triton_backend, "launch_shrink", recorder(shrink_kernel, launches))
    monkeypatch.setattr(triton_backend, "launch_expand", recorder(expand_kernel, launches))
    monkeypatch.setattr(triton_backend, "has_pdl", lambda device: capability >= 90)
    assert group.table is not None
    tiles = RowTiles(torch.zeros(num_tiles, 4, dtype=torch.int32), block_m)
    segments = Segments((0,), (), (tiles,))
    x = torch.empty(num_tiles, group.in_features, dtype=group.table.dtype)
    y = torch.empty(num_tiles, group.out_offsets[-1], dtype=group.table.dtype)
    triton_backend.add_lora(y, x, group, segments, config=config)
    assert len(launches) == 2
    return launches


def group_of(in_features: int, widths: tuple[int, ...], max_rank: int, dtype: torch.dtype) -> LoraGroup:
    table = SlotTable(torch.zeros(1, 8, dtype=torch.int64), max_rank, dtype)
    return LoraGroup(in_features, (0, *accumulate(widths)), [None], table)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "max_rank"), [(torch.float16, 16), (torch.bfloat16, 128), (torch.float32, 256)], ids=str
)
@pytest.mark.parametrize(
    ("block_m", "num_tiles"), [(PER_ROW, 32), (PER_ROW, 512), (GROUPED, 16), (GROUPED, 64), (PREFILL, 64)]
)
def test_compiles_within_shared_memory(
    block_m: int, num_tiles: int, dtype: torch.dtype, max_rank: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rule; grouped Q/K/V of an 8B model, of which K and V are narrower."""
    group = group_of(4096, (4096, 1024, 1024), max_rank, dtype)
    for kernel, args, kwargs in launches_of(group, block_m, num_tiles, capability, None, monkeypatch):
        compiled = compile_for(capability, kernel, args, kwargs)
        assert compiled.metadata.shared <= A100_SHARED_MEMORY
        text = compiled.asm["ptx"]
        assert ("griddepcontrol" in text) == (capability >= 90), "what only Hopper has is guarded"
        assert ("mma" in text) == (block_m != PER_ROW and dtype != torch.float32), "one row takes no tensor cores"
        if dtype != torch.float32:
            assert "ld.global.b16" not in text.replace("::", "."), "weights and activations load 16 bytes at a time"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "max_rank"), [(torch.float16, 16), (torch.bfloat16, 64), (torch.bfloat16, 128)], ids=str
)
def test_the_fused_expand_compiles(
    dtype: torch.dtype, max_rank: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an 8B model's shape, with and without the heads' norms."""
    launches: list[Launch] = []
    monkeypatch.setattr(fused, "launch_silu", recorder(fused.expand_silu_kernel, launches))
    monkeypatch.setattr(fused, "launch_rope", recorder(fused.expand_rope_kernel, launches))
    monkeypatch.setattr(fused, "has_pdl", lambda device: capability >= 90)
    rows, heads, dim = 64, (32, 8, 8), 128
    segments = Segments((0,), (), (RowTiles(torch.zeros(rows, 4, dtype=torch.int32), PREFILL),))
    qkv = torch.empty(rows, sum(heads), dim, dtype=dtype)
    group = group_of(4096, tuple(n * dim for n in heads), max_rank, dtype)
    v = triton_backend.empty_v(qkv.flatten(1), group, segments)
    angles, cache = torch.empty(rows, 1, dim // 2), torch.empty(8, 16, heads[1], dim, dtype=dtype)
    for norm in (None, QKNorm(qkv[0, 0], qkv[0, 1], 1e-6)):
        slots = torch.zeros(rows, dtype=torch.int64)
        rotation = Rotation(heads[0], norm, angles, angles, cache, cache, slots)
        fused.expand_rope_and_write_kv(qkv, v, group, segments, rotation)
    group = group_of(4096, (14336, 14336), max_rank, dtype)
    gate_up = torch.empty(rows, 28672, dtype=dtype)
    fused.expand_silu(gate_up, triton_backend.empty_v(gate_up, group, segments), group, segments)
    assert len(launches) == 3
    for kernel, args, kwargs in launches:
        compiled = compile_for(capability, kernel, args, kwargs)
        assert compiled.metadata.shared <= A100_SHARED_MEMORY
        text = compiled.asm["ptx"]
        assert ("griddepcontrol" in text) == (capability >= 90)
        assert "ld.global.b16" not in text.replace("::", ".")
        assert "st.global.v4" in text
        assert ("cp.async" in text) == (max_rank <= 64), "blocks of columns are under way side by side"


def test_every_tuned_configuration_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel that a packaged table can ask for, once."""
    seen = set()
    for path in FOLDER.glob("*.json"):
        for key, config in load_table(path.stem).items():
            group = group_of(
                key.in_features, key.widths, key.max_rank, {2: torch.float16, 4: torch.float32}[key.itemsize]
            )
            for kernel, args, kwargs in launches_of(group, key.block_m, key.num_tiles, 80, config, monkeypatch):
                name = (kernel.fn.__name__, key.block_m, *sorted(kwargs.items()))
                if name not in seen:
                    seen.add(name)
                    assert compile_for(80, kernel, args, kwargs).metadata.shared <= A100_SHARED_MEMORY
