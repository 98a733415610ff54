"""Page-locked host memory that the device's copy engine reads, made once and used again and again."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

_STEP = 1 << 20


class PinnedBuffer:
    """One growing buffer of bytes; pinned where ``device`` is a GPU, plain memory elsewhere.

    Allocated with huge pages and registered afterwards: faulting and locking 4 KiB pages one by one costs many times
    what the copy from them does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._release: Any = None

    @property
    def nbytes(self) -> int:
        return self._tensor.numel()

    def reserve(self, nbytes: int) -> None:
        """Makes it at least ``nbytes`` long; what it held is lost, and no copy from it may be under way."""
        if nbytes > self.nbytes:
            self.close()
            size = -(-nbytes // _STEP) * _STEP
            if self._device.type == "cuda":
                self._tensor = self._registered(size)
            else:
                self._tensor = torch.empty(size, dtype=torch.uint8)

    def tensor(self, start: int, stop: int) -> Tensor:
        """Its bytes [start, stop), uint8."""
        return self._tensor[start:stop]

    def memory(self, nbytes: int) -> memoryview:
        """Its first bytes, for files to be read into."""
        return self._tensor.numpy().data[:nbytes]

    def close(self) -> None:
        """Gives the memory back."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        if self._release is not None:
            self._release()
            self._release = None

    def _registered(self, size: int) -> Tensor:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            if int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0)) != 0:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        # the callback keeps the pages until the driver has let go of them
        self._release = weakref.finalize(self, _unregister, runtime, tensor.data_ptr(), pages)
        self._release.atexit = False
        return tensor


def _unregister(runtime: Any, address: int, pages: mmap.mmap) -> None:
    runtime.cudaHostUnregister(address)
