"""Which order of base product and add-on a step takes; what each computes is tested where the kernels run."""

from __future__ import annotations

import pytest
import torch
from punica_batch_kernels.sgmv.tiles import RowTiles
from punica_batch_kernels.sgmv.types import LoraGroup, Segments

pytest.importorskip("triton", reason="Triton is not installed")
from punica_batch_kernels.sgmv import linear


@pytest.mark.parametrize(
    ("rows", "captured", "has_lora", "order"),
    [
        (32, True, True, "beside"),
        (32, False, True, "first"),
        (256, True, True, "first"),
        (2048, False, True, "first"),
        (32, True, False, "first"),
    ],
)
def test_the_order_of_a_step(
    rows: int, captured: bool, has_lora: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def note(name: str) -> object:
        return lambda *args: taken.append(name) or torch.empty(0)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(linear.OrderedLinear, "side_by_side", note("beside"))
    monkeypatch.setattr(linear, "base_first", note("first"))
    tiles = (RowTiles.build([0, rows], [0], "cpu", 16),) if has_lora else ()
    segments = Segments((0, rows), (0 if has_lora else -1,), tiles)
    run = linear.OrderedLinear(torch.device("cpu"))
    run(lambda x: x, torch.empty(rows, 8), LoraGroup(8, (0, 8), [None]), segments)
    assert taken == [order]
