"""The rotation kernel in Triton's interpreter on the CPU. Triton reads TRITON_INTERPRET when it is imported: the file
runs itself in a process of its own.
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
    from punica_batch_kernels.elementwise.triton_rope import rope_and_write_kv
    from rope_cases import check_rope_and_write_kv

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize(
        ("rows", "heads", "head_dim"), [(1, (4, 4), 128), (37, (8, 2), 64), (5, (33, 3), 12), (3, (14, 2), 80)]
    )
    def test_against_float64(rows: int, heads: tuple[int, int], head_dim: int, norm: bool, dtype: torch.dtype) -> None:
        check_rope_and_write_kv(rope_and_write_kv, rows, heads, head_dim, dtype, "cpu", norm=norm)

    def test_no_rows() -> None:
        check_rope_and_write_kv(rope_and_write_kv, 0, (4, 2), 16, torch.float16, "cpu", norm=False)
