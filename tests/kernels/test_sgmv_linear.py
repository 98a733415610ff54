"""Which order of base product and add-on a step takes; what each computes is tested where the kernels run."""

from __future__ import annotations

import pytest
import torch
from punica_batch_kernels.sgmv.tiles import RowTiles
from punica_batch_kernels.sgmv.types import LoraGroup, Segments
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from punica_batch_kernels.sgmv import linear


@pytest.mark.parametrize(
    ("rows", "captured", "can_add", "has_lora", "order"),
    [
        (32, True, True, True, "beside"),
        (32, False, True, True, "first"),
        (256, True, True, True, "first"),
        (256, False, True, True, "first"),
        (2048, False, True, True, "last"),
        (2048, True, True, True, "first"),  # its replays may have base rows
        (2048, False, False, True, "first"),  # a bias, or a product that is added to an older tensor
        (2048, False, True, False, "first"),
        (32, True, True, False, "first"),
    ],
)
def test_the_order_of_a_step(
    rows: int, captured: bool, can_add: bool, has_lora: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def note(name: str) -> object:
        return lambda *args: taken.append(name) or torch.empty(0)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(linear.OrderedLinear, "side_by_side", note("beside"))
    monkeypatch.setattr(linear, "base_first", note("first"))
    monkeypatch.setattr(linear, "base_last", note("last"))
    tiles = (RowTiles.build([0, rows], [0], "cpu", 16),) if has_lora else ()
    segments = Segments((0, rows), (0 if has_lora else -1,), tiles)

    def add_base(y: Tensor, x: Tensor) -> Tensor:
        raise AssertionError

    run = linear.OrderedLinear(torch.device("cpu"))
    x = torch.empty(rows, 8)
    run(lambda x: x, x, LoraGroup(8, (0, 8), [None]), segments, add_base if can_add else None)
    assert taken == [order]
