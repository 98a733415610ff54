"""Messages of one line on stderr. Imports nothing slow: errors of the command line go through it, too."""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO

_COMMANDS = re.compile(r"`[^`]*`|python -c .*$", re.DOTALL)
_HELD = "\0"  # in place of a space at which no line may end


def write_line(line: str, file: IO[str]) -> None:
    """On a terminal broken between words where it is full; elsewhere, for whoever greps, whole."""
    print(folded(line, terminal_width(file)), file=file, flush=True)


def folded(line: str, width: int | None) -> str:
    """In lines of ``width`` columns, None: as it is. Words longer than that, such as paths, stay whole, and so do
    commands, to be copied: what stands between backticks, or is Python code at the end."""
    if width is None or len(line) <= width:
        return line
    whole = _COMMANDS.sub(lambda command: command[0].replace(" ", _HELD), line)
    folded = textwrap.fill(whole, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return folded.replace(_HELD, " ")


def terminal_width(file: IO[str]) -> int | None:
    """None where ``file`` is no terminal."""
    try:
        return os.get_terminal_size(file.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None
