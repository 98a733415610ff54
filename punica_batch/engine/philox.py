"""Counter-based random numbers: the same on every device, in every batch and every order; no state anywhere.

Philox4x32-10 is Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); splitmix64's finaliser is
Steele et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

OWN_SEED, ROW_NUMBER = 1, 0  # what a stream's `value` is


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64, elementwise: a bijection of uint64."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_keys(
    job_seed: int, flags: NDArray[np.uint64], values: NDArray[np.uint64], samples: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The Philox keys of random streams, uint64 [R]: functions of (job seed, flag, value, sample) alone.

    ``flags`` says whether ``values`` holds a row's own seed (``OWN_SEED``) or its number (``ROW_NUMBER``), so that a
    row seeded with 7 does not share row 7's stream. All arrays uint64 [R].
    """
    key = splitmix64(np.full(flags.shape, job_seed & (2**64 - 1), dtype=np.uint64))
    for word in (flags, values, samples):
        key = splitmix64(key ^ word)
    return key


def philox4x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: words in [0, 2**32) as int64, elementwise over whatever shapes broadcast; four words out.

    A product of two 32-bit numbers wraps in int64, but its 64 bits are right. The low half of a product is used
    unmasked: what is above it is masked where it would matter, in the next multiplicand.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ (c1 ^ k0)) & _MASK, ((p0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of 32-bit ``words`` (int64): -log(-log u), u = (word + 1/2) / 2**32.

    It lies in [-3.14, 22.88]: ``GUMBEL_SPAN`` is more than the widest difference of two draws. -log u is at most
    ``RACE_RATIO`` times 1 - u.
    """
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


GUMBEL_SPAN = 26.1
RACE_RATIO = 22.9
