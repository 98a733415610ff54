"""What the sampling kernels take and give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Greedy(NamedTuple):
    """``token_ids`` int64 [R]; ``finite`` bool [R]; ``largest`` float32 [R], the logit of the token."""

    token_ids: Tensor
    finite: Tensor
    largest: Tensor


class DrawParams(NamedTuple):
    """How D rows draw. ``numbers`` int64 [4, D]: row, top_k (0: all), Philox key, position of the token; ``shares``
    float64 [3, D]: temperature, min_p, top_p. Both contiguous."""

    numbers: Tensor
    shares: Tensor
