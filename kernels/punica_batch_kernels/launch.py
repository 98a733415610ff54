"""Launching a Triton kernel at little cost to the host.

Triton's own launcher binds and inspects every argument at every launch, some 40 to 105 µs on a slow core. What it
finds out is the same for equal shapes, so it is asked once, and the kernel it compiled is launched directly from then
on. That part of Triton's interface is not documented: where it is another one, Triton's launcher goes on serving.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Of a pointer, in bytes: what Triton specializes kernels for, and what every variant kept here was compiled for.
_ALIGNMENT_MASK = 15


class _Compiled(NamedTuple):
    run: Callable[..., None]
    function: int
    metadata: Any
    current_stream: Callable[[int], int]
    constants: tuple[None, ...]  # the compiled kernel has no use for them, but they hold their places


class Launcher:
    """Launches of one Triton kernel whose arguments are tensors, then numbers, then compile-time constants.

    The kernel must be specialized for the alignment of the first ``aligned`` tensors alone.
    """

    def __init__(self, kernel: Any, aligned: int = 2) -> None:
        self._kernel = kernel
        self._aligned = aligned
        self._compiled: dict[Hashable, _Compiled] = {}
        self._direct = True

    def __call__(
        self,
        key: Hashable,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        options: Callable[[], dict[str, Any]],
    ) -> None:
        """Launches ``programs`` programs on the current stream of the tensors' device, which is the current one.

        ``key`` must tell apart all that the compiled kernel depends on but the aligned tensors' alignment: the
        kernel's constants and Triton's options, which ``options`` gives where they are needed, the dtypes, the
        device, and each of ``numbers`` that Triton specializes for.
        """
        pointers = [tensor.data_ptr() for tensor in tensors]
        if not self._direct or any(pointer & _ALIGNMENT_MASK for pointer in pointers[: self._aligned]):
            self._kernel[(programs,)](*tensors, *numbers, **options())
            return
        compiled = self._compiled.get(key)
        if compiled is None:
            kernel = self._kernel[(programs,)](*tensors, *numbers, **options())
            self._keep(key, kernel, len(tensors) + len(numbers))
            return
        stream = compiled.current_stream(tensors[0].get_device())
        try:
            compiled.run(
                programs, 1, 1, stream, compiled.function, compiled.metadata, None, None, None,
                *pointers, *numbers, *compiled.constants,
            )  # fmt: skip
        except TypeError:  # a launcher of other parameters: it refused them before it launched
            self._direct = False
            self._kernel[(programs,)](*tensors, *numbers, **options())

    def _keep(self, key: Hashable, kernel: Any, num_arguments: int) -> None:
        """``kernel``: what Triton's launch returned, the compiled kernel; nothing in its interpreter."""
        try:
            from triton.runtime import driver

            current_stream = driver.active.get_current_stream
            constants = (None,) * (len(self._kernel.arg_names) - num_arguments)
            self._compiled[key] = _Compiled(
                kernel.run, kernel.function, kernel.packed_metadata, current_stream, constants
            )
        except (AttributeError, ImportError, RuntimeError):
            self._direct = False


@cache
def has_pdl(device: int) -> bool:
    """Programmatic dependent launch came with Hopper. ``device``: of CUDA; below 0 for a CPU."""
    return device >= 0 and torch.cuda.get_device_capability(device) >= (9, 0)
