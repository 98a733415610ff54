"""The loads and popularities that speed figures refer to, against numbers that must never change."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from punica_batch.bench.popularity import POPULARITIES, ROWS, LoadKind, Popularity, load, popularity, segment_lengths


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("kind", "cap", "prompt_tokens", "new_tokens", "sha256"),
    [
        ("decode", 32, 14353, 50002, "bd965ed5b81cd78e"),
        ("decode", 256, 59980, 211692, "56558643048cdf36"),
        ("chat", 32, 131072, 32768, "5dcd75eaff8652d7"),
        ("chat", 256, 262144, 65536, "1371402e60ac016e"),
        ("label", 256, 256000, 8000, "2e9046c8e3f450d8"),
    ],
)
def test_loads(kind: LoadKind, cap: int, prompt_tokens: int, new_tokens: int, sha256: str) -> None:
    prompts, new = load(kind, ROWS[cap][kind])
    assert (sum(map(len, prompts)), sum(new)) == (prompt_tokens, new_tokens)
    assert digest([[prompt.tolist() for prompt in prompts], new]) == sha256


@pytest.mark.parametrize(
    ("kind", "rows", "sha256"),
    [
        ("distinct", 32, "02631793446ba2fd"),
        ("distinct", 1000, "3e726f1b6f58ece8"),
        ("identical", 256, "ba1a044f61b89809"),
        ("uniform", 32, "8be41ee623516472"),
        ("uniform", 1000, "01f43b497dba9d3b"),
        ("skewed", 32, "4adcef1da8f13e2e"),
        ("skewed", 256, "f8222a85a915bc6b"),
        ("skewed", 1000, "02b61e091f303e0f"),
    ],
)
def test_popularities(kind: Popularity, rows: int, sha256: str) -> None:
    assert digest(popularity(kind, rows).tolist()) == sha256


def test_decode_lengths_stay_in_the_cap() -> None:
    prompts, new = load("decode", 500, cap=64, vocab_size=100)
    lengths = np.array([len(prompt) for prompt in prompts])
    assert lengths.min() >= 2
    assert lengths.max() == 32
    assert min(new) >= 2
    assert (lengths + new).max() <= 63
    assert max(int(prompt.max()) for prompt in prompts) < 100


@pytest.mark.parametrize("rows", [1, 2, 10, 32, 100])
@pytest.mark.parametrize("kind", POPULARITIES)
def test_segments_hold_every_row_once(kind: Popularity, rows: int) -> None:
    lengths = segment_lengths(kind, rows)
    which = popularity(kind, rows).tolist()
    assert lengths == [which.count(adapter) for adapter in sorted(set(which))]


def test_distinct_is_a_segment_a_row() -> None:
    assert segment_lengths("distinct", 5) == [1] * 5
    assert segment_lengths("identical", 5) == [5]
    assert segment_lengths("uniform", 10) == [3, 3, 2, 2]
