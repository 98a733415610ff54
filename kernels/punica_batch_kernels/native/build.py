"""The C kernels' library: compiled at first use with the machine's own C compiler and kept in a cache folder."""

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

import torch

from punica_batch_kernels.native.openmp import openmp_runtime

_SOURCES = sorted((Path(__file__).parent / "csrc").glob("*.[ch]"))
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float}


class Library:
    """The compiled C functions. ``threads()`` are the last two arguments of those that run on several."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        # a second pool of threads would fight with torch's for the cores; without the runtime: one thread
        runtime = openmp_runtime()
        self._parallel = None if runtime is None else ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value

    def function(self, name: str, arguments: str, *, threads: bool = True) -> Any:
        """``arguments``: a letter each, p an address or None, l an int64, f a float; without those of ``threads``."""
        function = getattr(self._library, f"punica_{name}")
        function.restype = None
        function.argtypes = [_TYPES[letter] for letter in arguments]
        if threads:
            function.argtypes = [*function.argtypes, ctypes.c_void_p, ctypes.c_int]
        return function

    def flag(self, name: str) -> bool:
        """A constant of the library."""
        return bool(ctypes.c_int.in_dll(self._library, f"punica_{name}").value)

    def threads(self) -> tuple[int | None, int]:
        return self._parallel, torch.get_num_threads()


def load_library(cache: Path) -> Library | None:
    """The library, built into ``cache`` unless it is there; None where it cannot be built or loaded."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or platform.system() != "Linux":
        return None
    key = hashlib.sha256(repr((_FLAGS, platform.machine(), _cpu_features())).encode())
    for source in _SOURCES:
        key.update(source.read_bytes())
    path = cache / f"punica_cpu-{key.hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _compile(compiler, path)
        return Library(path)
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str, path: Path) -> None:
    """Into its place by one rename: several workers may do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-o", str(built), *(str(s) for s in _SOURCES if s.suffix == ".c"), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        built.rename(path)


def _cpu_features() -> str:
    """What ``-march=native`` may use: a cache folder can be shared by machines of several kinds."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else ""
