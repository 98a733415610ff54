"""The rotation kernel in Triton's interpreter on the CPU. Triton reads TRITON_INTERPRET when it is imported: the file
runs itself in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import INTERPRETED, run_in_interpreter

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

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
