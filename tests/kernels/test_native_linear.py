"""The linear layer's product in C against float64: any shape, strides; a row's bits depend on nothing but the row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from punica_batch_kernels.native.kernels import NativeKernels
from punica_batch_kernels.native.linear import MAX_ROWS, NativeLinear
from punica_batch_kernels.products.reference import add_linear
from torch import Tensor


@pytest.fixture(scope="module")
def native(native_kernels: NativeKernels) -> NativeLinear:
    return native_kernels.linear


SHAPES = (
    st.one_of(st.integers(0, 70), st.integers(120, 140)),
    st.sampled_from([1, 2, 15, 16, 17, 64, 191, 192, 193, 400]),
    st.sampled_from([1, 5, 15, 16, 17, 47, 48, 49, 96, 100, 150]),
    st.booleans(),
    st.integers(0, 99),
)
QUICK = settings(max_examples=80, deadline=None)


@given(*SHAPES)
@QUICK
def test_any_shape(native: NativeLinear, rows: int, size: int, out: int, has_bias: bool, seed: int) -> None:
    x, weight, bias, want = operands(rows, size, out, has_bias, seed)
    torch.testing.assert_close(native.linear(x, weight, bias).double(), want, atol=2e-6 * size**0.5 * 4, rtol=1e-5)


@given(*SHAPES)
@QUICK
def test_any_shape_onto_what_is_there(
    native: NativeLinear, rows: int, size: int, out: int, has_bias: bool, seed: int
) -> None:
    """Strided rows; what lies beside them stays. The sum is that of y and the product, rounded on its own."""
    x, weight, bias, want = operands(rows, size, out, has_bias, seed)
    wide = torch.full((rows, out + 3), math.nan)
    y = wide[:, 1 : out + 1].copy_(torch.randn(rows, out, generator=torch.Generator().manual_seed(seed + 1)))
    before = y.clone()
    native.add_linear(y, x, weight, bias)
    torch.testing.assert_close(y.double(), before.double() + want, atol=2e-6 * size**0.5 * 4, rtol=1e-5)
    assert torch.isnan(wide[:, 0]).all()
    assert torch.isnan(wide[:, -2:]).all()
    if native.is_available:
        assert torch.equal(y, before + native.linear(x, weight, bias))


def operands(rows: int, size: int, out: int, has_bias: bool, seed: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x (strided, beside NaN), weight, bias, and the product in float64."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, size + 3), math.nan)
    x = wide[:, 1 : size + 1].copy_(torch.randn(rows, size, generator=generator))
    weight = torch.randn(out, size, generator=generator)
    bias = torch.randn(out, generator=generator) if has_bias else None
    want = x.double() @ weight.double().t()
    return x, weight, bias, want if bias is None else want + bias.double()


def test_a_rows_result_depends_on_nothing_else(native: NativeLinear, two_threads: None) -> None:
    if not native.is_available:
        pytest.skip("on this processor the products are the BLAS's")
    x, weight = torch.randn(130, 500), torch.randn(200, 500)
    together = native.linear(x, weight)
    for first, last in ((0, 1), (5, 25), (70, 115), (0, 64), (100, 130)):
        assert torch.equal(together[first:last], native.linear(x[first:last], weight))
    torch.set_num_threads(1)
    assert torch.equal(together, native.linear(x, weight))


def test_many_rows_and_half_precision_are_the_blas(native: NativeLinear) -> None:
    for rows, dtype in ((MAX_ROWS + 1, torch.float32), (3, torch.bfloat16)):
        x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 30), (40, 30), (40,)))
        product = torch.nn.functional.linear(x, weight)
        assert torch.equal(native.linear(x, weight), product)
        ours, theirs = product.clone(), product.clone()
        native.add_linear(ours, x, weight, bias)
        add_linear(theirs, x, weight, bias)
        assert torch.equal(ours, theirs)
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        want = 2 * (x.double() @ weight.double().t()) + bias.double()
        torch.testing.assert_close(ours.double(), want, atol=tolerance, rtol=1e-2)
