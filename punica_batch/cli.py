"""The ``punica-batch`` command: one entry for parsing, signals and errors; each command is a module of ``commands``.

Nothing slow is imported before a command runs, so that ``--help`` answers at once; torch is never imported here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from punica_batch.commands import adapters, bench, doctor, plan, retry, run, status, validate
from punica_batch.errors import Interrupted, PunicaError, Signalled
from punica_batch.ui.lines import write_line

app = typer.Typer(
    name="punica-batch",
    help="Run a Parquet dataset through one base model and thousands of LoRA adapters, offline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run.run, plan.plan, validate.validate, status.status, retry.retry, doctor.doctor):
    app.command()(command)
app.add_typer(adapters.app, name="adapters")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"punica-batch {version('punica-batch')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """The console script."""
    code = execute(sys.argv[1:])
    # Nothing is left to do. Libraries' threads can abort a process that takes its time to end (pyarrow 26: one in some
    # forty jobs on a busy machine), and a job that is done would seem to have failed.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def execute(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Every error is one line on stderr; ``-v`` adds where."""
    context: dict[str, bool] = {}
    with _signals():
        try:
            code: Any = app(list(arguments), prog_name="punica-batch", standalone_mode=False, obj=context)
            return code if isinstance(code, int) else 0
        except Signalled as error:
            failure: BaseException = error
            line, exit_code = str(error), Interrupted.exit_code
        except PunicaError as error:
            failure = error
            line, exit_code = str(error), error.exit_code
        except Exception as error:
            failure = error
            line, exit_code = _usage_line(error) or _internal_line(error)
    if context.get("verbose"):
        traceback.print_exception(failure)
    if line:
        write_line(f"punica-batch: {' '.join(line.split())}", sys.stderr)
    return exit_code


def _usage_line(error: Exception) -> tuple[str, int] | None:
    """What typer itself complains of (in whichever copy of click its version uses), else None."""
    if not hasattr(error, "format_message"):
        return None
    message = error.format_message()  # empty when typer has shown the help because nothing was asked
    likely = getattr(error, "possibilities", None)  # nearest first; the message has them by alphabet
    if likely:
        message = f"{getattr(error, 'message', message)}; did you mean {likely[0]}?"
    command = getattr(getattr(error, "ctx", None), "command_path", "punica-batch")
    return (f"{message} (see {command} --help)" if message else ""), 2


def _internal_line(error: Exception) -> tuple[str, int]:
    # Other libraries' messages may quote data: no more than their beginning is shown.
    message = str(error)[:200]
    return f"internal error: {type(error).__name__}: {message} (run with -v to see where)", 1


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGINT unwind with exit 75, a second one ends at once. A running job puts its own handlers in place
    of these, which journal first. Signals that the caller ignores (``nohup``, ``&``) stay ignored."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
    raise Signalled(signal.Signals(number).name)
