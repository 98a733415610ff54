"""All kernels in C for float32 on a CPU: one library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from punica_batch_kernels.native.attention import NativeAttention
from punica_batch_kernels.native.build import load_library
from punica_batch_kernels.native.elementwise import NativeElementwise
from punica_batch_kernels.native.linear import NativeLinear
from punica_batch_kernels.native.sgmv import NativeSgmv


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """Their results do not depend on the number of threads. They keep buffers: one caller at a time."""

    sgmv: NativeSgmv
    attention: NativeAttention
    elementwise: NativeElementwise
    linear: NativeLinear


def load_native(cache: Path) -> NativeKernels | None:
    """Compiled into ``cache`` unless they are there; None where that cannot be done."""
    library = load_library(cache)
    if library is None:
        return None
    return NativeKernels(
        NativeSgmv(library), NativeAttention(library), NativeElementwise(library), NativeLinear(library)
    )
