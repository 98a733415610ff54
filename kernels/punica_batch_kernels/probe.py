"""What torch, Triton and FlashInfer say of this machine's GPU: ``python -m punica_batch_kernels.probe`` prints JSON.

A process of its own, as each of them can take a process down, and importing them takes seconds.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch


def examine() -> dict[str, Any]:
    """``version``, ``cuda`` (what torch was built for, None: CPU), ``available``, ``devices`` (names), ``reason`` (why
    CUDA is not available); where it is: ``triton`` and ``flashinfer``, each with ``version`` and ``error`` (or null),
    ``triton.error`` also when a small kernel does not compile or compute."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    reason = next((_line(w.message) for w in caught), None)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else []
    facts: dict[str, Any] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "available": available, "devices": names,
        "reason": reason,
    }  # fmt: skip
    if available:
        facts |= {"triton": _triton(), "flashinfer": _flashinfer()}
    return facts


def _triton() -> dict[str, str | None]:
    try:
        import triton
    except Exception as error:
        return {"version": None, "error": _line(error)}
    try:
        from punica_batch_kernels.probe_kernel import add_one

        x = torch.zeros(1, dtype=torch.int32, device="cuda")
        add_one[(1,)](x)
        found = int(x.item())
        error_line = None if found == 1 else f"a kernel computed {found} in place of 1"
    except Exception as error:  # no C compiler, no Python headers, no ptxas for this GPU
        error_line = _line(error)
    return {"version": triton.__version__, "error": error_line}


def _flashinfer() -> dict[str, str | None]:
    try:
        import flashinfer
    except Exception as error:
        return {"version": None, "error": _line(error)}
    return {"version": flashinfer.__version__, "error": None}


def _line(error: object) -> str:
    """The first line and, of an error that begins with a place in a source, the last: what is wrong there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1] if not lines or not lines[0].endswith(":") else [lines[0], lines[-1]]
    return f"{type(error).__name__}: {' '.join(said)}"[:300]


if __name__ == "__main__":
    json.dump(examine(), sys.stdout)
