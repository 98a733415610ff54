"""Norms, rotary embedding, activation and cache writes in C against float64; strided inputs, odd sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from punica_batch_kernels.elementwise import reference
from punica_batch_kernels.native.elementwise import NativeElementwise
from punica_batch_kernels.native.kernels import NativeKernels
from torch import Tensor

SIZES = st.sampled_from([1, 2, 8, 15, 16, 17, 33, 64, 100, 576])
ROWS = st.sampled_from([0, 1, 3, 64, 200])
CLOSE = {"atol": 2e-6, "rtol": 4e-6}
QUICK = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def native(native_kernels: NativeKernels) -> NativeElementwise:
    return native_kernels.elementwise


def beside_nan(*shape: int, seed: int) -> Tensor:
    """Random numbers in a wider tensor of NaN."""
    *outer, size = shape
    wide = torch.full((*outer, size + 5), math.nan)
    return wide[..., 2 : size + 2].copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@given(ROWS, SIZES, st.integers(0, 99))
@QUICK
def test_rms_norm(native: NativeElementwise, rows: int, size: int, seed: int) -> None:
    x, weight = beside_nan(rows, size, seed=seed), torch.randn(size)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-5).double(), normed(x, weight, 1e-5), **CLOSE)


@given(st.integers(1, 40), st.integers(1, 5), SIZES, st.integers(0, 99))
@QUICK
def test_rms_norm_of_heads_in_place(native: NativeElementwise, rows: int, heads: int, size: int, seed: int) -> None:
    """As the query and key norms: some of the heads of a fused projection."""
    fused = beside_nan(rows, (heads + 2) * size, seed=seed).unflatten(1, (heads + 2, size))
    before, weight = fused.clone(), torch.randn(size)
    native.rms_norm(fused[:, 1 : heads + 1], weight, 1e-6, out=fused[:, 1 : heads + 1])
    torch.testing.assert_close(
        fused[:, 1 : heads + 1].double(), normed(before[:, 1 : heads + 1], weight, 1e-6), **CLOSE
    )
    assert torch.equal(fused[:, 0], before[:, 0])
    assert torch.equal(fused[:, -1], before[:, -1])


@given(ROWS, SIZES, st.integers(0, 99))
@QUICK
def test_silu_and_mul(native: NativeElementwise, rows: int, size: int, seed: int) -> None:
    x = beside_nan(rows, 2 * size, seed=seed) * 5
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(native.silu_and_mul(x).double(), gate * torch.sigmoid(gate) * up, **CLOSE)


@pytest.mark.parametrize("gate", [0.0, -0.0, 1e-30, -80.0, -90.0, -200.0, -3e38, 88.0, 200.0, 1e30, math.nan, math.inf])
def test_silu_at_the_ends_of_float32(native: NativeElementwise, gate: float) -> None:
    x = torch.tensor([[gate] * 17 + [1.0] * 17])
    torch.testing.assert_close(native.silu_and_mul(x), reference.silu_and_mul(x), atol=1e-30, rtol=1e-6, equal_nan=True)


@given(ROWS, st.integers(1, 5), st.sampled_from([2, 16, 30, 64, 80, 128]), st.integers(0, 99))
@QUICK
def test_apply_rope(native: NativeElementwise, rows: int, heads: int, head_dim: int, seed: int) -> None:
    fused = beside_nan(rows, (heads + 1) * head_dim, seed=seed).unflatten(1, (heads + 1, head_dim))
    before = fused.clone()
    angles = torch.randn(rows, 1, head_dim // 2)
    native.apply_rope(fused[:, :heads], angles.cos(), angles.sin())
    pairs = torch.complex(*before[:, :heads].double().chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    want = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(fused[:, :heads].double(), want, **CLOSE)
    assert torch.equal(fused[:, heads], before[:, heads])
    again = before.clone()
    reference.apply_rope(again[:, :heads], angles.cos(), angles.sin())
    torch.testing.assert_close(again[:, :heads].double(), want, **CLOSE)
    assert torch.equal(again[:, heads], before[:, heads])


def test_write_kv_takes_views_of_a_fused_projection(native: NativeElementwise) -> None:
    fused = torch.randn(3, 4 * 20)
    k, v = fused[:, :40].view(3, 2, 20), fused[:, 40:].view(3, 2, 20)
    k_cache, v_cache = (torch.full((2, 16, 2, 20), math.nan) for _ in range(2))
    slots = torch.tensor([16 + 3, 0, 7])
    native.write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(-1, 2, 20)[slots], k)
    assert torch.equal(v_cache.view(-1, 2, 20)[slots], v)
    assert int(torch.isnan(k_cache).any(-1).any(-1).sum()) == 2 * 16 - 3, "no other slot is written"


def test_half_precision_is_the_references(native: NativeElementwise) -> None:
    x, weight = torch.randn(3, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16)
    assert torch.equal(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(native.silu_and_mul(x), reference.silu_and_mul(x))


def test_results_do_not_depend_on_threads(native: NativeElementwise, two_threads: None) -> None:
    x, weight = torch.randn(300, 576), torch.randn(576)
    norm, silu = native.rms_norm(x, weight, 1e-5), native.silu_and_mul(x)
    torch.set_num_threads(1)
    assert torch.equal(norm, native.rms_norm(x, weight, 1e-5))
    assert torch.equal(silu, native.silu_and_mul(x))
    assert torch.equal(norm[7:8], native.rms_norm(x[7:8], weight, 1e-5))
