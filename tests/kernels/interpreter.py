"""Tests of Triton kernels in its interpreter, on the CPU: Triton reads TRITON_INTERPRET when it is imported, so their
file runs itself in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_in_interpreter(test_file: str) -> None:
    """All tests that ``test_file`` has where ``INTERPRETED`` is true; skips where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "-x", test_file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
