"""The program as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "punica_batch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
