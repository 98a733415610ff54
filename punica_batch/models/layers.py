"""The decoder's parts: plain classes and functions over tensors, inference only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from punica_batch_kernels.backend import ComputeLinear
from torch import Tensor

from punica_batch.models.config import RopeConfig


class Linear:
    """y = x W^T + b. What calls it knows only ``apply`` and ``add_to``: the weight may become a shard, or quantised.

    ``weight`` [out, in], ``bias`` [out] or None; ``compute``: the kernel.
    """

    __slots__ = ("bias", "compute", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, compute: ComputeLinear) -> None:
        self.weight = weight
        self.bias = bias
        self.compute = compute

    @classmethod
    def empty(
        cls, out: int, into: int, compute: ComputeLinear, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        weight = torch.empty(out, into, dtype=dtype, device=device)
        return cls(weight, torch.empty(out, dtype=dtype, device=device) if bias else None, compute)

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [T, in] to [T, out], a new tensor."""
        return self.compute(x, self.weight, self.bias)

    @property
    def add_to(self) -> Callable[[Tensor, Tensor], None] | None:
        """Adds ``apply(x)`` to y [T, out] in place, given (y, x), rounding once; None where that takes more than the
        product."""
        return self._add_to if self.bias is None else None

    def _add_to(self, y: Tensor, x: Tensor) -> None:
        y.addmm_(x, self.weight.t())


def rope_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Inverse frequencies, float32 [head_dim / 2], scaled as the config says (Su et al. 2021, section 3.2.2).

    "linear" divides all by the factor. "llama3" divides those whose wavelength exceeds the original context by the
    factor, keeps those well inside it, and blends in between, as in Meta's Llama 3.1 release.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        cycles = rope.original_max_position_embeddings / wavelengths
        blend = ((cycles - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        frequencies = (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies.to(device)


def rope_cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, float32 [T, 1, head_dim / 2]; ``positions`` int [T].

    Computed once a step from the positions, so nothing is bounded by, or as large as, the model's context.
    """
    angles = positions[:, None, None] * frequencies
    return angles.cos(), angles.sin()
