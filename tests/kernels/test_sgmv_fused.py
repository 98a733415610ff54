"""The kernels with the expand inside, in Triton's interpreter, against float64. Triton reads TRITON_INTERPRET when it
is imported: the file runs itself in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
    def test_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "-x", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]

else:
    import math

    from punica_batch_kernels.elementwise.types import QKNorm, Rotation
    from punica_batch_kernels.sgmv import fused
    from punica_batch_kernels.sgmv.linear import TritonFusedProducts
    from punica_batch_kernels.sgmv.tiles import PREFILL
    from punica_batch_kernels.sgmv.triton_backend import empty_v, sgmv_shrink
    from punica_batch_kernels.sgmv.types import LoraGroup, Segments
    from rope_cases import BLOCK, normed, rotated
    from sgmv_cases import expected, make_group, make_segments
    from torch import Tensor

    LAYOUTS = {
        "mixed": [(-1, 2), (0, 5), (1, 1), (-1, 1), (2, 19), (3, 1), (0, 1)],
        "one by one": [(i % 4, 1) for i in range(9)],
        "base first": [(-1, 33), (3, 2)],
        "all base but one": [(-1, 7), (1, 1), (-1, 3)],
    }
    RANKS = [(16, 16, 16), (1, 0, 3), (40, 100, 8), (0, 5, 0)]  # 100: more than the expand takes at a time
    CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3}

    def covered(layout: list[tuple[int, int]], spare: int) -> Segments:
        """In tall tiles, some of them unused."""
        segments = make_segments(layout, torch.device("cpu"), PREFILL)
        assert segments.tiles is not None
        used = segments.tiles[0].entries.shape[0]
        return make_segments(layout, torch.device("cpu"), PREFILL, used + spare)

    def shrunk(x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
        v = empty_v(x, group, segments).fill_(math.nan)
        sgmv_shrink(v, x, group, segments)
        return v

    def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
        assert torch.isfinite(got).all()
        scale = want.square().mean().sqrt()
        assert float(((got.double() - want).abs() / (want.abs() + scale)).max()) <= CLOSE[dtype]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_expand_silu(layout: str, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        segments = covered(LAYOUTS[layout], spare=3)
        rows, size = segments.seg_indptr[-1], 1350  # several programs, the last block of columns not whole
        group = make_group([r[:2] for r in RANKS], 72, (size, size), torch.empty(0, dtype=dtype))
        x, base = torch.randn(rows, 72).to(dtype), torch.randn(rows, 2 * size).to(dtype)
        got = fused.expand_silu(base, shrunk(x, group, segments), group, segments)
        gate, up = expected(base, x, group, segments).chunk(2, dim=1)
        close(got, torch.nn.functional.silu(gate) * up, dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 32), ((3, 3), 20), ((16, 8), 16)])
    def test_expand_rope(heads: tuple[int, int], head_dim: int, norm: bool, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        num_heads, kv_heads = heads
        segments = covered(LAYOUTS["mixed"], spare=2)
        rows, widths = segments.seg_indptr[-1], [n * head_dim for n in (num_heads, kv_heads, kv_heads)]
        group = make_group(RANKS, 72, widths, torch.empty(0, dtype=dtype))
        x, base = torch.randn(rows, 72).to(dtype), torch.randn(rows, sum(widths)).to(dtype)
        angles = torch.randn(rows, 1, head_dim // 2) * 10
        blocks = rows // BLOCK + 2
        shape = (blocks, BLOCK, kv_heads, head_dim)
        k_cache, v_cache = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        slots = torch.randperm(blocks * BLOCK)[:rows]
        weights = QKNorm(*(torch.randn(head_dim).to(dtype) for _ in range(2)), 1e-6) if norm else None
        qkv = base.clone().view(rows, -1, head_dim)
        rotation = Rotation(num_heads, weights, angles.cos(), angles.sin(), k_cache, v_cache, slots)
        fused.expand_rope_and_write_kv(qkv, shrunk(x, group, segments), group, segments, rotation)
        want = expected(base, x, group, segments).view(rows, -1, head_dim)
        q, k, v = want.split_with_sizes([num_heads, kv_heads, kv_heads], dim=1)
        if weights is not None:
            q, k = normed(q, weights.q_weight, 1e-6), normed(k, weights.k_weight, 1e-6)
        close(qkv[:, :num_heads], rotated(q, angles), dtype)
        close(k_cache.flatten(0, 1)[slots], rotated(k, angles), dtype)
        close(v_cache.flatten(0, 1)[slots], v, dtype)
        for cache in (k_cache, v_cache):
            assert int(cache.isnan().flatten(2).any(-1).sum()) == blocks * BLOCK - rows, "no other slot is written"

    def test_a_large_step() -> None:
        torch.manual_seed(3)
        layout = [(0, 512), (1, 40), *((i % 4, 1) for i in range(36)), (-1, 3)]
        segments = make_segments(layout, torch.device("cpu"))
        assert segments.all_rows
        group = make_group([(4, 3)] * 4, 512, (24, 24), torch.empty(0, dtype=torch.float32))
        rows = segments.seg_indptr[-1]
        x, base = torch.randn(rows, 512), torch.randn(rows, 48)
        got = TritonFusedProducts().silu_and_mul(lambda x: base, x, group, segments)
        gate, up = expected(base, x, group, segments).chunk(2, dim=1)
        close(got, torch.nn.functional.silu(gate) * up, torch.float32)
