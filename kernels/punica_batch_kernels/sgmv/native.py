"""SGMV in C for float32 decode steps on a CPU (``csrc/sgmv_cpu.c``); all else goes to ``reference``.

Compiled at first use with the machine's own C compiler and kept in a cache folder; a machine without one runs the
reference. One call a group replaces a BLAS call for each segment and slice, which at decode are too small to be worth
their overhead or a second core.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.types import MAX_SLICES, LoraGroup, Segments, SlotWeights

# As in the C source.
_TASK_ROWS = 8
_MAX_RANK_SUM = 768
# Beyond this many rows a segment's products are large enough for BLAS on all cores.
_MAX_SEGMENT_ROWS = 32
_SOURCE = Path(__file__).parent / "csrc" / "sgmv_cpu.c"
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


class NativeSgmv:
    """``add_lora`` as ``reference.add_lora``, with the C kernel where it applies.

    The result does not depend on the number of threads. ``path``: the compiled library.
    """

    def __init__(self, path: Path) -> None:
        self._kernel = ctypes.CDLL(str(path)).punica_sgmv_f32
        self._kernel.restype = None
        self._kernel.argtypes = [
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int,
        ]  # fmt: skip
        self._parallel = _torch_openmp()
        self._tasks_of: Segments | None = None
        self._tasks: NDArray[np.int32] = np.empty((0, 3), np.int32)

    def add_lora(
        self, y: Tensor, x: Tensor, group: LoraGroup, segments: Segments, buffer: Tensor | None = None
    ) -> None:
        """y += (x A.T) B.T for each segment; ``x`` [T, in], ``y`` [T, out], both may be strided by row."""
        if self._tasks_of is not segments:
            self._tasks_of, self._tasks = segments, _make_tasks(segments)
        slots = self._descriptors(group, segments) if len(self._tasks) and _fits(x) and _fits(y) else None
        if slots is None:
            reference.add_lora(y, x, group, segments, buffer)
            return
        offsets = (ctypes.c_int64 * len(group.out_offsets))(*group.out_offsets)
        self._kernel(
            x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), group.in_features, slots, self._tasks.ctypes.data,
            len(self._tasks), len(group.out_offsets) - 1, offsets, self._parallel, torch.get_num_threads(),
        )  # fmt: skip

    def _descriptors(self, group: LoraGroup, segments: Segments) -> Any:
        """The address of each segment's weights (null: nothing to add); None when one needs the reference."""
        addresses: list[int | None] = []
        for slot in segments.lora_indices_host:
            weights = group.slots[slot] if slot >= 0 else None
            if weights is None:
                addresses.append(None)
                continue
            if weights.descriptor is None:
                weights.descriptor = _describe(weights)
            if not len(weights.descriptor):
                return None
            addresses.append(weights.descriptor.ctypes.data)
        return (ctypes.c_void_p * len(addresses))(*addresses)


def load(cache: Path) -> NativeSgmv | None:
    """The compiled kernel, built into ``cache`` unless it is there; None where it cannot be built or loaded."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or platform.system() != "Linux":
        return None
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, platform.machine(), _cpu_features())).encode())
    path = cache / f"sgmv_cpu-{key.hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _compile(compiler, path)
        return NativeSgmv(path)
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str, path: Path) -> None:
    """Into its place by one rename: several workers may do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-o", str(built), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        built.rename(path)


def _cpu_features() -> str:
    """What ``-march=native`` may use: a cache folder can be shared by machines of several kinds."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else ""


def _torch_openmp() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch has loaded: a second pool of threads would fight
    with torch's for the cores. None: one thread."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libgomp" in line:
            runtime = ctypes.CDLL(line.split(maxsplit=5)[5])
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
    return None


def _make_tasks(segments: Segments) -> NDArray[np.int32]:
    """int32 [tasks, 3]: segment, first row, rows. Empty where a segment is too long for this kernel."""
    tasks = []
    for i, (slot, length) in enumerate(zip(segments.lora_indices_host, segments.lengths, strict=True)):
        if slot < 0:
            continue
        if length > _MAX_SEGMENT_ROWS:
            return np.empty((0, 3), np.int32)
        start = segments.seg_indptr_host[i]
        tasks += [(i, start + k, min(_TASK_ROWS, length - k)) for k in range(0, length, _TASK_ROWS)]
    return np.array(tasks, np.int32).reshape(-1, 3)


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.stride(1) == 1


def _describe(weights: SlotWeights) -> NDArray[np.int64]:
    """The C struct ``slot``; empty where the kernel cannot take the weights as they lie."""
    matrices = [weights.a, *(b for b in weights.b_t if b is not None)]
    good = all(m.is_contiguous() and m.dtype == torch.float32 for m in matrices)
    if not good or weights.a.shape[0] > _MAX_RANK_SUM:
        return np.empty(0, np.int64)
    padding = [0] * (MAX_SLICES - len(weights.ranks))
    b = [0 if b is None else b.data_ptr() for b in weights.b_t]
    return np.array([weights.a.data_ptr(), weights.a.shape[0], *b, *padding, *weights.ranks, *padding], np.int64)
