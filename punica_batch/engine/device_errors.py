"""Telling a device that has failed from everything else that can go wrong."""

from __future__ import annotations

import torch

_ACCELERATOR_ERROR: type[BaseException] | None = getattr(torch, "AcceleratorError", None)  # since torch 2.8


def is_device_error(error: BaseException | None) -> bool:
    """Whether a CUDA call failed for good (an illegal access, an ECC or Xid error, a GPU off the bus), in ``error`` or
    what caused it: from then on every call of this process fails, and only a new process can use the device again. Out
    of memory is not one."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return False
        if _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR):
            return True
        if isinstance(error, RuntimeError) and "CUDA error" in str(error):
            return True
        error = error.__cause__
    return False
