"""The OpenMP runtime that torch has loaded (GNU's, in its Linux builds)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def openmp_runtime() -> ctypes.CDLL | None:
    """None where torch has loaded none, or another than GNU's."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        if "libgomp" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[5])
    return None


def use_one_thread() -> None:
    """For a thread beside the one that computes: torch operations on it run on it alone.

    Otherwise the runtime starts a pool for it, counts more threads than cores, and from then on puts those of every
    pool to sleep at once when they have nothing to do: waking them costs each parallel region some 40 µs.
    """
    torch.get_num_threads()  # torch sets the thread's number when first asked
    runtime = openmp_runtime()
    if runtime is not None:
        runtime.omp_set_num_threads(1)
