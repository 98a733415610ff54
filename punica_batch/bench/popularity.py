"""Which adapter each row has, and the loads that speed figures refer to: the same numbers everywhere.

Popularities as in the Punica paper, section 7: *distinct*, every row its own adapter; *uniform*, ceil(sqrt n) adapters
in turn; *skewed*, as many by a Zipf-like law, each 1.5 times as likely as the next; *identical*, one for all.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Popularity = Literal["distinct", "uniform", "skewed", "identical"]
LoadKind = Literal["decode", "chat", "label"]

POPULARITIES: tuple[Popularity, ...] = ("distinct", "uniform", "skewed", "identical")
# rows of each load by the batch cap that serves it
ROWS: dict[int, dict[LoadKind, int]] = {
    32: {"decode": 256, "chat": 256, "label": 1000},
    256: {"decode": 1024, "chat": 512, "label": 1000},
}
LOAD_SEED = 0xABCDABCD987
_SKEWED_SEED = 7
_SKEW = 1.5
# prompt and new tokens of every row
_FIXED: dict[str, tuple[int, int]] = {"chat": (512, 128), "label": (256, 8)}


def popularity(kind: Popularity, n: int) -> NDArray[np.int64]:
    """Adapter number of each of ``n`` rows, in row order."""
    if kind == "distinct":
        return np.arange(n, dtype=np.int64)
    if kind == "identical":
        return np.zeros(n, dtype=np.int64)
    adapters = math.ceil(math.sqrt(n))
    if kind == "uniform":
        return np.arange(n, dtype=np.int64) % adapters
    weights = _SKEW ** -np.arange(adapters, dtype=float)
    return np.random.default_rng(_SKEWED_SEED).choice(adapters, n, p=weights / weights.sum()).astype(np.int64)


def segment_lengths(kind: Popularity, n: int) -> list[int]:
    """Rows of each adapter that has any, when ``n`` rows are grouped by adapter."""
    return [int(rows) for rows in np.bincount(popularity(kind, n)) if rows]


def load(kind: LoadKind, n: int, cap: int = 512, vocab_size: int = 32000) -> tuple[list[NDArray[np.int32]], list[int]]:
    """``n`` rows' prompts (token ids) and numbers of new tokens, EOS ignored; served first come, first served.

    decode: prompts lognormal(0.8, 1.0) x 18, clipped to [2, cap // 2]; lengths in all uniform in [0, cap), raised to
    prompt + 2. chat: 512 in, 128 out. label: 256 in, 8 out.
    """
    rng = np.random.Generator(np.random.PCG64(LOAD_SEED))
    if kind == "decode":
        prompts = np.clip(rng.lognormal(0.8, 1.0, n) * 18, 2, cap // 2).astype(int)
        new = np.maximum(rng.integers(0, cap, n), prompts + 2) - prompts
    else:
        prompts, new = (np.full(n, value) for value in _FIXED[kind])
    ids = [rng.integers(3, vocab_size, int(length)).astype(np.int32) for length in prompts]
    return ids, [int(count) for count in new]
