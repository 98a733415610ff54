"""SGMV in C for float32 on a CPU (``csrc/sgmv.c``); all else goes to ``sgmv.reference``.

One call a group replaces a BLAS call for each segment and slice, which at decode are too small to be worth their
overhead or a second core, and in a prefill are bound by reading and writing y all the same.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from punica_batch_kernels.native.build import Library
from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.types import MAX_SLICES, LoraGroup, Segments, SlotWeights

# As in the C source.
_TASK_ROWS = 8
_MAX_RANK_SUM = 768


class NativeSgmv:
    """``add_lora`` as ``reference.add_lora``, with the C kernel where it applies.

    The result does not depend on the number of threads.
    """

    def __init__(self, library: Library) -> None:
        self._threads = library.threads
        self._kernel = library.function("sgmv", "plpllppllp")
        self._tasks_of: Segments | None = None
        self._tasks: NDArray[np.int32] = np.empty((0, 3), np.int32)
        self._tasks_address = 0

    def add_lora(
        self, y: Tensor, x: Tensor, group: LoraGroup, segments: Segments, buffer: Tensor | None = None
    ) -> None:
        """y += (x A.T) B.T for each segment; ``x`` [T, in], ``y`` [T, out], both may be strided by row."""
        if self._tasks_of is not segments:
            self._tasks_of, self._tasks = segments, _make_tasks(segments, group)
            self._tasks_address = self._tasks.ctypes.data
        slots = _descriptors(group, segments) if _fits(x) and _fits(y) else None
        if slots is None:
            reference.add_lora(y, x, group, segments, buffer)
            return
        offsets = (ctypes.c_int64 * len(group.out_offsets))(*group.out_offsets)
        self._kernel(
            x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), group.in_features, slots, self._tasks_address,
            len(self._tasks), len(group.out_offsets) - 1, offsets, *self._threads(),
        )  # fmt: skip


def _descriptors(group: LoraGroup, segments: Segments) -> Any:
    """The address of each segment's weights (null: nothing to add); None when one needs the reference."""
    addresses: list[int | None] = []
    for slot in segments.lora_indices:
        weights = group.slots[slot] if slot >= 0 else None
        if weights is None:
            addresses.append(None)
            continue
        if weights.descriptor is None:
            weights.descriptor = _describe(weights)
        if not len(weights.descriptor):
            return None
        addresses.append(ctypes.addressof(weights.descriptor))
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _make_tasks(segments: Segments, group: LoraGroup) -> NDArray[np.int32]:
    """int32 [tasks, 3]: segment, first row, rows.

    The most work comes first, by this group's ranks, which tell well enough of the step's other groups'.
    """
    slots = [group.slots[slot] if slot >= 0 else None for slot in segments.lora_indices]
    ranks = np.array([0 if weights is None else weights.a.shape[0] for weights in slots], np.int64)
    lengths = np.array(segments.lengths, np.int64) * (np.array(segments.lora_indices) >= 0)
    counts = -(-lengths // _TASK_ROWS)
    segment = np.repeat(np.arange(len(lengths)), counts)
    first = (np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)) * _TASK_ROWS
    rows = np.minimum(lengths[segment] - first, _TASK_ROWS)
    starts = np.array(segments.seg_indptr[:-1], np.int64)
    order = np.argsort(-rows * ranks[segment], kind="stable")
    return np.stack([segment, starts[segment] + first, rows], axis=1)[order].astype(np.int32)


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.stride(1) == 1


def _describe(weights: SlotWeights) -> Any:
    """The C struct ``slot``; empty where the kernel cannot take the weights as they lie."""
    matrices = [weights.a, *(b for b in weights.b_t if b is not None)]
    good = all(m.is_contiguous() and m.dtype == torch.float32 for m in matrices)
    if not good or weights.a.shape[0] > _MAX_RANK_SUM:
        return (ctypes.c_int64 * 0)()
    padding = [0] * (MAX_SLICES - len(weights.ranks))
    b = [0 if b is None else b.data_ptr() for b in weights.b_t]
    fields = [weights.a.data_ptr(), weights.a.shape[0], *b, *padding, *weights.ranks, *padding]
    return (ctypes.c_int64 * len(fields))(*fields)
