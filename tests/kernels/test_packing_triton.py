"""Repacking in Triton against plain torch, in the interpreter on the CPU (a process of its own, as Triton reads
TRITON_INTERPRET when it is imported); bit for bit.
"""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from interpreter import INTERPRETED, run_in_interpreter
from packing_cases import draw_moves, raw_data
from punica_batch_kernels.packing import reference
from punica_batch_kernels.packing.types import Move, build_work

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

else:
    from punica_batch_kernels.packing import triton_backend

    def run(raw: torch.Tensor, moves: list[Move], size: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """What both write, from NaN; and the flag."""
        ours, exact = torch.full((size,), nan, dtype=dtype), torch.full((size,), nan, dtype=dtype)
        flags = torch.zeros(2, dtype=torch.int32)
        triton_backend.repack(ours, raw, build_work(moves, "cpu"), flags[:1])
        reference.repack(exact, raw, moves, flags[1:])
        assert torch.equal(ours.view(torch.uint8), exact.view(torch.uint8))
        assert flags[0] == flags[1]
        return ours, int(flags[0])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("stored", [(torch.float16,), (torch.float32,), (torch.float32, torch.float16)], ids=str)
    @pytest.mark.parametrize("ranks", [(16, 8, 64), (1, 3, 17), (129, 2)], ids=str)
    def test_as_the_reference(ranks: tuple[int, ...], stored: tuple[torch.dtype, ...], dtype: torch.dtype) -> None:
        moves, size, nbytes = draw_moves(ranks, stored, features=(72, 520), seed=len(ranks))
        _, flag = run(raw_data(moves, nbytes), moves, size, dtype)
        assert flag == 0

    @pytest.mark.parametrize("value", [nan, inf, -inf, 65000.0])
    @pytest.mark.parametrize("place", [0, 1, -1])
    def test_what_is_not_finite_raises_the_flag(value: float, place: int) -> None:
        """At the first, an inner and the last element of every matrix; a B that its scale makes overflow, too."""
        moves, size, nbytes = draw_moves((3, 16), (torch.float32,), features=(72, 520), seed=5)
        for move in moves:
            raw = raw_data(moves, nbytes)
            elements = raw.view(move.dtype)
            elements[move.source + place % move.size] = value
            _, flag = run(raw, moves, size, torch.float16)
            assert flag == (value != 65000.0 or move.scale > 1.01)
