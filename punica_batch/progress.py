"""What a running job tells whoever shows it, and what it hands back at the end.

``job`` produces these; ``ui`` (or a test, or a notebook) consumes them. Plain data, no drawing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

from punica_batch.types import JsonDict, WorkerStats

Phase = Literal["planning", "checking", "starting", "running", "stopping", "assembling", "done", "stopped"]
WorkerState = Literal["starting", "running", "restarting", "released", "done"]


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker at a moment. ``stats`` is None until its first message; ``tokens_per_s`` counts generated tokens."""

    name: str
    state: WorkerState
    stats: WorkerStats | None = None
    tokens_per_s: float = 0.0
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The job at a moment.

    ``rows_done`` of ``rows_total`` are finished, error rows included; ``rows_before`` of these were finished when this
    run began. Tokens, rates and ``elapsed_s`` count this run alone.

    While it runs, the tokens are those that its workers have computed, of rows that have not finished too; at the end
    they are the finished rows'. ``tokens_per_s``: generated ones a second lately (at the end, over the whole run);
    ``mean_tokens_per_s``: over the whole run, its start included. ``stop_reason`` and ``grace_s``, the seconds that
    running rows still have, are set in the phase "stopping".
    """

    rows_total: int
    rows_done: int = 0
    rows_before: int = 0
    rows_error: int = 0
    errors_by_code: Mapping[str, int] = field(default_factory=dict)
    parts_done: int = 0
    parts_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_s: float = 0.0
    mean_tokens_per_s: float = 0.0
    eta_s: float | None = None
    elapsed_s: float = 0.0
    phase: Phase = "planning"
    workers: tuple[WorkerLine, ...] = ()
    stop_reason: str | None = None
    grace_s: float | None = None


class Progress(Protocol):
    """Where a job reports. Called from the job's own thread only."""

    def note(self, line: str) -> None:
        """A message of one line, such as "no NVIDIA device found: running one CPU worker"."""

    def update(self, snapshot: Snapshot) -> None:
        """The newest state, about four times a second."""

    def close(self) -> None:
        """The job is over, well or not. Safe to call twice."""


class NoProgress:
    """Shows nothing: the default of the Python interface."""

    def note(self, line: str) -> None:
        pass

    def update(self, snapshot: Snapshot) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class JobSummary:
    """How a job ended. Rows, errors and finish reasons are the whole output's; tokens and times are this run's, which
    finished ``rows_run`` rows.

    ``finish_reasons`` counts samples by reason (``stop``, ``length``, ``error``). ``already_complete``: the output was
    finished before and has been left alone.
    """

    output: str
    rows: int
    rows_done: int
    rows_error: int = 0
    errors_by_code: Mapping[str, int] = field(default_factory=dict)
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    elapsed_s: float = 0.0
    tokens_per_s: float = 0.0
    rows_run: int = 0
    already_complete: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: all rows are done; 3: done, with error rows."""
        return 3 if self.rows_error else 0

    def as_dict(self) -> JsonDict:
        """JSON-ready, the schema of ``run --json``."""
        return {"schema_version": 1, **asdict(self), "exit_code": self.exit_code}
