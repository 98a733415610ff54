"""A projection's two ways to multiply: into a new tensor, and onto one that is there."""

from __future__ import annotations

import pytest
import torch
from punica_batch_kernels.backend import REFERENCE
from punica_batch_kernels.sgmv.types import LoraGroup, Segments
from torch.nn import functional

from punica_batch.models.layers import Linear


def test_the_product_is_added_in_place() -> None:
    linear = Linear(torch.randn(24, 40), None, functional.linear)
    x, y = torch.randn(7, 40), torch.randn(7, 24)
    want = y.double() + x.double() @ linear.weight.double().t()
    place = y.data_ptr()
    assert linear.add_to is not None
    linear.add_to(y, x)
    assert y.data_ptr() == place
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=1e-5)


def test_with_a_bias_there_is_no_single_product_to_add() -> None:
    assert Linear(torch.randn(24, 40), torch.randn(24), functional.linear).add_to is None


@pytest.mark.parametrize("with_add", [False, True])
def test_kernels_that_keep_to_one_order_need_no_sum_in_place(with_add: bool) -> None:
    linear = Linear(torch.randn(24, 40), None, functional.linear)
    x, group, segments = torch.randn(7, 40), LoraGroup(40, (0, 24), [None]), Segments.build([0, 7], [0])
    got = REFERENCE.lora_linear(linear.apply, x, group, segments, linear.add_to if with_add else None)
    assert torch.equal(got, linear.apply(x))
