"""The smallest Triton kernel, to see whether Triton can compile and launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(x):  # Triton looks annotations up, and refuses most
    """x[0] += 1."""
    tl.store(x, tl.load(x) + 1)
