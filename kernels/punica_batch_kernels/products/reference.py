"""A linear layer's product onto a tensor that is there, in plain torch. (New ones: ``torch.nn.functional.linear``.)"""

from __future__ import annotations

from torch import Tensor


def add_linear(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """y += x W^T + b in place; ``x`` [T, in], ``y`` [T, out], ``weight`` [out, in]. A bias is one more pass over y."""
    y.addmm_(x, weight.t())
    if bias is not None:
        y += bias
