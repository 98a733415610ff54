"""Where text goes: results to stdout, progress to stderr. A reader that closes the pipe (``| head``) is no error."""

from __future__ import annotations

import json
import os
import sys

from rich.console import Console, RenderableType

from punica_batch.types import JsonDict

PLAIN_WIDTH = 10_000  # off a terminal nothing is wrapped or cut: a program may be reading


def render(renderable: RenderableType) -> str:
    """As it looks on stdout: styled and fitted to a terminal, plain otherwise. ``NO_COLOR`` is honoured by rich."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def emit(text: str) -> None:
    """Prints a result to stdout."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more at exit: let it write where that cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit_json(value: JsonDict) -> None:
    emit(json.dumps(value, indent=2, ensure_ascii=False))


def error_console() -> Console:
    """stderr, where progress is shown."""
    return Console(stderr=True, highlight=False)
