"""The decoder's parts: plain classes and functions over tensors, inference only."""

from __future__ import annotations

import math

import torch
from punica_batch_kernels.backend import Kernels
from torch import Tensor

from punica_batch.models.config import RopeConfig


class Linear:
    """x W^T + b. What calls it knows only ``apply`` and ``add_to``: the weight may become a shard, or quantised.

    ``weight`` [out, in], ``bias`` [out] or None; ``kernels``: their ``linear`` and ``add_linear`` compute it.
    """

    __slots__ = ("bias", "kernels", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        self.weight = weight
        self.bias = bias
        self.kernels = kernels

    @classmethod
    def empty(
        cls, out: int, into: int, kernels: Kernels, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        weight = torch.empty(out, into, dtype=dtype, device=device)
        return cls(weight, torch.empty(out, dtype=dtype, device=device) if bias else None, kernels)

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [T, in] to [T, out], a new tensor."""
        return self.kernels.linear(x, self.weight, self.bias)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T, out] += ``apply(x)`` in place; returns y."""
        self.kernels.add_linear(y, x, self.weight, self.bias)
        return y


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
