"""Chat templates: messages to the text that a model was trained on.

A template comes from whoever published the model or the adapter, so it runs in ``sandbox.TemplateEnvironment`` with
bounds on its size, its output and (in a process's main thread) its processor time.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError

from punica_batch.errors import InputError, ModelError, RowError
from punica_batch.text.sandbox import MAX_CHARS, RaisedByTemplate, TemplateEnvironment

MAX_SECONDS = 2.0  # of processor time, one rendering
_MAX_SOURCE = 1 << 20
T = TypeVar("T")
_FILE = "<template>"  # jinja2's name for the code it makes


class _TimedOut(BaseException):
    """Not an Exception, so that no handler inside a template's machinery takes it."""


class ChatTemplate:
    """A compiled template. Raises ``InputError`` (naming ``where``) when ``source`` is not a valid one.

    ``special_tokens``: what the template may write by name (``bos_token``, ``eos_token``, ...).
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: datetime | None = None,
        where: str = "chat template",
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise InputError(f"{where}: larger than {_MAX_SOURCE} characters")
        self._source = source
        self._variables = dict(special_tokens)
        self._max_seconds = max_seconds
        environment = TemplateEnvironment(now or datetime.now())
        try:
            self._template = _limited(max_seconds, lambda: environment.from_string(source))
        except TemplateSyntaxError as error:
            raise InputError(f"{where}: line {error.lineno}: {error.message}") from error
        except (_TimedOut, RecursionError, MemoryError, ValueError, OverflowError) as error:
            raise InputError(f"{where}: cannot be compiled ({type(error).__name__.strip('_')})") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text for ``messages`` (as ``parse_messages`` gives them).

        Raises ``RowError``: ``template_failed`` (an error in the template, its own ``raise_exception``, or an output
        above 4 Mi characters) or ``template_timeout``. What it says never holds a message's text.
        """
        variables = self._variables | {
            "messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        try:
            return _limited(self._max_seconds, lambda: self._collect(variables))
        except _TimedOut:
            raise RowError(
                "template_timeout", f"the chat template ran for over {self._max_seconds:g} s; mend or replace it"
            ) from None
        except RowError:
            raise
        except RaisedByTemplate as error:
            message = str(error)
            said = f": {message}" if message and message in self._source else ""
            raise RowError("template_failed", f"the chat template refuses these messages{said}") from None
        except Exception as error:
            line = _template_line(error.__traceback__)
            at = f" at line {line}" if line else ""
            raise RowError("template_failed", f"the chat template failed{at} ({type(error).__name__})") from None

    def _collect(self, variables: dict[str, Any]) -> str:
        parts, size = [], 0
        for part in self._template.generate(variables):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARS:
                raise RowError("template_failed", f"the chat template wrote more than {MAX_CHARS} characters")
        return "".join(parts)


def _template_line(traceback: TracebackType | None) -> int | None:
    """The template's line where an error arose."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == _FILE:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _limited(seconds: float, function: Callable[[], T]) -> T:
    """``function()``, or ``_TimedOut`` after so much of the process's own processor time.

    By the virtual timer, which a busy machine does not run down. Signals reach the main thread only: elsewhere there
    is no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    armed = True

    def ring(_signal: int, _frame: FrameType | None) -> None:
        if armed:
            raise _TimedOut

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)  # again, should the first be swallowed
            return function()
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def find_chat_template(folder: str | Path, override: str | None) -> str | None:
    """The source of the template to use; None when there is none.

    ``override`` (``--chat-template``): a file, the template itself, or the name of one of the model's. Without it:
    chat_template.jinja, else ``chat_template`` of tokenizer_config.json (of several, the one named ``default``).
    Raises ``InputError`` or ``ModelError``.
    """
    named = _model_templates(Path(folder))
    if override is not None:
        return named[override] if override in named else read_template(override, "--chat-template")
    if named and "default" not in named:
        raise ModelError(f"{folder}: no default chat template; choose one with --chat-template: {', '.join(named)}")
    return named.get("default")


def read_template(value: str, where: str) -> str:
    """``value`` itself where it looks like a template, else the content of the file that it names (``InputError``)."""
    if any(char in value for char in "{}\n"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InputError(f"{where}: {value[:200]} is neither a jinja template nor a readable file: {reason}") from error


def _model_templates(folder: Path) -> dict[str, str]:
    found = {}
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            value = json.loads(config.read_bytes()).get("chat_template")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{config}: not a JSON object") from error
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            found |= {str(t["name"]): str(t["template"]) for t in value if isinstance(t, dict) and "template" in t}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = file.read_text(encoding="utf-8")
    return found
