"""The exception tree.

    PunicaError                 every error this package raises on purpose; carries an exit code
    ├── UsageError        (2)   the command line or the Python call is wrong
    ├── ValidationError   (4)   input, model, adapters or job file are wrong, found before any work
    │   ├── ConfigError         a job file: unknown key, wrong type
    │   ├── InputError          input files: missing column, type, schema, hidden column
    │   ├── ModelError          a model folder: unknown architecture, field not honoured
    │   ├── AdapterError        an adapter: refused by name, missing tensor, wrong shape
    │   └── BindingError        a resume whose input, model, adapter or options have changed
    ├── JobError          (1)   the job failed; running it again may succeed
    │   └── WorkerError         a worker process failed more often than allowed
    ├── Interrupted       (75)  stopped by a signal, a time limit; running again continues
    │   ├── OutputLocked        another run holds the output
    │   ├── DiskFull            no room for journal or parts
    │   └── StoreAway           a file store does not answer after the retries
    └── RowError                one row cannot be run; becomes that row's ``error`` column

Messages are one line: what, where, what to do. They never contain prompt text or credentials.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import ClassVar

# Looking for the nearest name takes its time: a thousand wrong names need not have one each.
_MAX_HINTS, _MAX_HINT_NAMES, _MAX_HINT_LENGTH = 20, 10_000, 100


def ended(text: str) -> str:
    """``text`` as a sentence that another may follow: with a full stop unless it has an end of its own."""
    return text if text.endswith((".", "?", "!", "…")) else f"{text}."


class PunicaError(Exception):
    """Root of all errors raised on purpose; ``exit_code`` is the process's exit status."""

    exit_code: ClassVar[int] = 1


class UsageError(PunicaError):
    exit_code = 2


class ValidationError(PunicaError):
    exit_code = 4


class ConfigError(ValidationError):
    pass


class InputError(ValidationError):
    pass


class ModelError(ValidationError):
    pass


class AdapterError(ValidationError):
    pass


class BindingError(ValidationError):
    pass


class JobError(PunicaError):
    exit_code = 1


class WorkerError(JobError):
    pass


class Interrupted(PunicaError):
    exit_code = 75


class Signalled(BaseException):
    """A signal's handler unwinds the process with it; it becomes ``Interrupted`` at the top. Not an ``Exception``: code
    that expects any failure of a library must not take it for one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"stopped by {name}; run the same command again to continue")


class OutputLocked(Interrupted):
    pass


class DiskFull(Interrupted):
    pass


class StoreAway(Interrupted):
    pass


class RowError(PunicaError):
    """One row's failure. ``str(error)`` is ``code: sentence``, the value of the ``error`` column.

    The codes are stable and listed in ``docs/reference.md``.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code
        self.sentence = sentence

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        return RowError, (self.code, self.sentence)


class UnknownAdapters:
    """Makes the errors of names that a registry does not have, wherever they are met: one text for all."""

    def __init__(self) -> None:
        self._hints_left = _MAX_HINTS

    def error(self, lora_id: object, names: Collection[str]) -> RowError:
        """``names``: those that there are; the nearest one is proposed. None at all: no adapters are configured."""
        if not names:
            return RowError("unknown_adapter", "no adapters are named: give --adapters or --lora-modules")
        hint = ""
        if (
            isinstance(lora_id, str)
            and self._hints_left
            and len(names) <= _MAX_HINT_NAMES
            and len(lora_id) <= _MAX_HINT_LENGTH
        ):
            self._hints_left -= 1
            near = difflib.get_close_matches(lora_id, sorted(names), n=1, cutoff=0.7)
            hint = f"; did you mean {shown_name(near[0])}?" if near else ""
        return RowError("unknown_adapter", f"the registry has no adapter {shown_name(lora_id)}{hint}")


def shown_name(lora_id: object) -> str:
    """In quotes, cut where it is long."""
    text = repr(lora_id)
    return text if len(text) <= 100 else text[:97] + "..."
