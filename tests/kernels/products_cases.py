"""What the tests of products on the CPU and on GPUs share."""

from __future__ import annotations

import torch
from punica_batch_kernels.products.few_rows import FewRowsLinear
from torch import Tensor

# of values about 1: a step of the type and a half, as the sum in float32 has an order of its own
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-20}


def operands(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device, *, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias, so that the outputs are about 1."""
    x = torch.randn(rows, in_features, device=device).to(dtype)
    weight = (torch.randn(out_features, in_features, device=device) * in_features**-0.5).to(dtype)
    return x, weight, torch.randn(out_features, device=device).to(dtype) if bias else None


def check(linear: FewRowsLinear, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Into a new tensor and onto one with strided rows, each twice, against float64."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    first = linear(x, weight, bias)
    _close(first, exact)
    assert torch.equal(linear(x, weight, bias), first)
    wide = torch.full((x.shape[0], 2 * weight.shape[0] + 8), float("nan"), dtype=x.dtype, device=x.device)
    y = wide[:, 8 : 8 + weight.shape[0]]
    before = torch.randn_like(exact).to(x.dtype)
    y.copy_(before)
    linear.add_to(y, x, weight, bias)
    _close(y, exact + before.double())
    again = before.clone()
    linear.add_to(again, x, weight, bias)
    assert torch.equal(again, y)
    others = torch.cat((wide[:, :8], wide[:, 8 + weight.shape[0] :]), dim=1)
    assert others.isnan().all(), "other columns are left alone"


def _close(y: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[y.dtype]
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
