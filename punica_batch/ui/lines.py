"""Messages of one line on stderr. Imports nothing slow: errors of the command line go through it, too."""

from __future__ import annotations

import os
import textwrap
from typing import IO


def write_line(line: str, file: IO[str]) -> None:
    """On a terminal broken between words where it is full; elsewhere, for whoever greps, whole."""
    print(folded(line, terminal_width(file)), file=file, flush=True)


def folded(line: str, width: int | None) -> str:
    """In lines of ``width`` columns, None: as it is. Words longer than that, such as paths, stay whole."""
    if width is None or len(line) <= width:
        return line
    return textwrap.fill(line, max(width, 1), break_long_words=False, break_on_hyphens=False)


def terminal_width(file: IO[str]) -> int | None:
    """None where ``file`` is no terminal."""
    try:
        return os.get_terminal_size(file.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None
