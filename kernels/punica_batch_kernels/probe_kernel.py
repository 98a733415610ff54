"""The smallest Triton kernel, to see whether Triton can compile and launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_one(x: Any) -> None:
    """x[0] += 1."""
    tl.store(x, tl.load(x) + 1)
