"""Where compiled GPU kernels are kept: in ``PUNICA_BATCH_CACHE``, for `doctor`, workers and ``Engine`` alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from punica_batch.adapters.digest import cache_folder


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """Something that has been built. ``compiled``: how many kernels were not in the cache yet. ``error``: one line
    where it could not be built and the engine does without it."""

    name: str
    seconds: float
    compiled: int
    error: str | None = None


def kernel_environment(capability: tuple[int, int] | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables for a process that uses a GPU of this compute capability (None: unknown), to be set before it
    imports torch. What ``environ`` sets itself stays; where the cache folder cannot be written to, the libraries'
    own folders are left to them.

    FlashInfer appends ``.cache/flashinfer/VERSION/ARCHITECTURE`` to its base.
    """
    folder = cache_folder().expanduser().absolute()
    variables: dict[str, str] = {}
    if capability is not None:
        major, minor = capability
        # Hopper's own instructions are in the architecture "9.0a"; FlashInfer completes the names of later ones
        variables["FLASHINFER_CUDA_ARCH_LIST"] = f"{major}.{minor}" + ("a" if major == 9 else "")
    if _is_writable(str(folder)):
        variables["FLASHINFER_WORKSPACE_BASE"] = str(folder)
        if "TRITON_HOME" not in environ:
            variables["TRITON_CACHE_DIR"] = str(folder / "triton")
    return {name: value for name, value in variables.items() if not environ.get(name)}


def _is_writable(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
