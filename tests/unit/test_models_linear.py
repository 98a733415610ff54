"""A projection's two ways to multiply: into a new tensor, and onto one that is there; without adapters and with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from punica_batch_kernels.backend import REFERENCE
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights
from torch import Tensor
from torch.nn import functional

from punica_batch.models.layers import Linear


def make(has_bias: bool) -> tuple[Linear, Tensor, Tensor, Tensor]:
    """A projection, x, y, and y with the product added, in float64."""
    torch.manual_seed(int(has_bias))
    linear = Linear(torch.randn(24, 40), torch.randn(24) if has_bias else None, REFERENCE)
    x, y = torch.randn(7, 40), torch.randn(7, 24)
    want = y.double() + x.double() @ linear.weight.double().t()
    return linear, x, y, want if linear.bias is None else want + linear.bias.double()


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_added_in_place(has_bias: bool) -> None:
    linear, x, y, want = make(has_bias)
    assert linear.add_to(y, x) is y
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_adapters_are_added_to_the_same_tensor(has_bias: bool) -> None:
    linear, x, y, want = make(has_bias)
    a, b = torch.randn(3, 40), torch.randn(24, 3)
    group = LoraGroup(40, (0, 24), [SlotWeights(a, (b,), (3,))])
    segments = Segments.build([0, 2, 7], [-1, 0])
    want[2:] += x[2:].double() @ a.double().t() @ b.double().t()
    assert REFERENCE.lora_linear(partial(linear.add_to, y), x, group, segments) is y
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-5)


def test_without_adapters_it_is_the_product() -> None:
    linear = Linear(torch.randn(24, 40), None, REFERENCE)
    x, group, segments = torch.randn(7, 40), LoraGroup(40, (0, 24), [None]), Segments.build([0, 7], [0])
    assert torch.equal(REFERENCE.lora_linear(linear.apply, x, group, segments), linear.apply(x))


def test_either_way_is_the_kernels_own() -> None:
    """What multiplies few rows faster is asked for both."""
    asked = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append("new")
        return functional.linear(x, weight, bias)

    def add_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        asked.append("onto")
        y += functional.linear(x, weight, bias)

    linear, x, y, want = make(True)
    linear.kernels = replace(REFERENCE, linear=product, add_linear=add_product)
    before = y.clone()
    torch.testing.assert_close((linear.apply(x) + before).double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear.add_to(y, x).double(), want, atol=1e-5, rtol=1e-5)
    assert asked == ["new", "onto"]
