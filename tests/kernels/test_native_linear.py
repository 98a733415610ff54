"""The linear layer's product in C against float64: any shape, strides; a row's bits depend on nothing but the row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from punica_batch_kernels.native.kernels import NativeKernels
from punica_batch_kernels.native.linear import MAX_ROWS, NativeLinear


@pytest.fixture(scope="module")
def native(native_kernels: NativeKernels) -> NativeLinear:
    return native_kernels.linear


@given(
    st.one_of(st.integers(0, 70), st.integers(120, 140)),
    st.sampled_from([1, 2, 15, 16, 17, 64, 191, 192, 193, 400]),
    st.sampled_from([1, 5, 15, 16, 17, 47, 48, 49, 96, 100, 150]),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_any_shape(native: NativeLinear, rows: int, size: int, out: int, has_bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, size + 3), math.nan)
    x = wide[:, 1 : size + 1].copy_(torch.randn(rows, size, generator=generator))
    weight = torch.randn(out, size, generator=generator)
    bias = torch.randn(out, generator=generator) if has_bias else None
    want = x.double() @ weight.double().t()
    if bias is not None:
        want += bias.double()
    torch.testing.assert_close(native.linear(x, weight, bias).double(), want, atol=2e-6 * size**0.5 * 4, rtol=1e-5)


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
    x, weight = torch.randn(MAX_ROWS + 1, 30), torch.randn(40, 30)
    assert torch.equal(native.linear(x, weight), torch.nn.functional.linear(x, weight))
    x, weight = torch.randn(3, 30).bfloat16(), torch.randn(40, 30).bfloat16()
    assert torch.equal(native.linear(x, weight), torch.nn.functional.linear(x, weight))
