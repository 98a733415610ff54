"""``validate``: every row, adapter and template checked on the CPU; what would fail, by code, with row numbers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass

from punica_batch.config import JobConfig
from punica_batch.planning.opened import OpenedJob, open_job, shard_rows
from punica_batch.planning.preflight import Preflight, allowance, allowed_failures, preflight
from punica_batch.progress import Progress, Snapshot
from punica_batch.text.prepare import Preparer
from punica_batch.types import JsonDict, RowResult

ROWS_SHOWN = 10  # row numbers kept for each code
_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """Rows that would fail with ``code``: how many, the first ``ROWS_SHOWN`` row numbers, and the first one's error."""

    code: str
    rows: int
    first_rows: tuple[int, ...]
    example: str


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """``rows`` checked, ``rows_failing`` of them; ``adapters``: distinct ones that rows name, missing and bad ones
    among them; ``problems``: of these, each once; ``stops``: ``run`` would refuse or stop, since the failures exceed
    ``limit`` (``--max-errors``; ``allowance``: in words); ``option_columns``: input columns taken for options of their
    rows."""

    rows: int
    rows_failing: int
    limit: int
    allowance: str
    adapters: int
    failures: tuple[Failure, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    option_columns: tuple[str, ...]

    @property
    def stops(self) -> bool:
        return self.rows_failing > self.limit

    @property
    def exit_code(self) -> int:
        """That of ``run``, as far as can be known: 4 when it would stop or refuse, 3 with error rows, else 0."""
        return 4 if self.stops else 3 if self.rows_failing else 0

    def as_dict(self) -> JsonDict:
        """JSON-ready, the schema of ``validate --json``."""
        return {"schema_version": 1, **asdict(self), "stops": self.stops}


class _Tally:
    """Failures by code, as they are met."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self._first: dict[str, list[RowResult]] = {}

    def add(self, result: RowResult) -> None:
        assert result.error is not None
        code = result.error.partition(":")[0]
        self.rows[code] += 1
        first = self._first.setdefault(code, [])
        if len(first) < ROWS_SHOWN:
            first.append(result)

    def failures(self) -> tuple[Failure, ...]:
        """Most rows first."""
        ordered = sorted(self.rows.items(), key=lambda item: (-item[1], item[0]))
        return tuple(
            Failure(code, rows, tuple(result.row for result in self._first[code]), str(self._first[code][0].error))
            for code, rows in ordered
        )


def validate_rows(config: JobConfig, progress: Progress) -> ValidationReport:
    """Checks everything that can be checked without weights. Raises what ``open_job`` raises: what concerns the whole
    job is an error, not a finding."""
    job = open_job(config)
    start, stop = shard_rows(config, job.source.num_rows)
    found = preflight(job, start, stop)
    tally = _check_rows(job, found, start, stop, progress)
    return ValidationReport(
        rows=stop - start,
        rows_failing=tally.rows.total(),
        limit=allowed_failures(config, stop - start),
        allowance=allowance(config, stop - start),
        adapters=len(found.use.names()),
        failures=tally.failures(),
        problems=tuple(found.errors[name] for name in sorted(found.errors)),
        warnings=found.warnings,
        option_columns=job.source.option_columns,
    )


def _check_rows(job: OpenedJob, found: Preflight, start: int, stop: int, progress: Progress) -> _Tally:
    preparer = Preparer(job.text_settings(found.specs, found.errors))
    tally = _Tally()
    row, began = start, time.monotonic()
    for batch in job.source.work_batches(start, stop, _BATCH_ROWS):
        for result in preparer.prepare(batch, row).errors:
            tally.add(result)
        row += batch.num_rows
        done, elapsed = row - start, time.monotonic() - began
        progress.update(
            Snapshot(
                rows_total=stop - start,
                rows_done=done,
                rows_error=tally.rows.total(),
                errors_by_code=dict(tally.rows),
                phase="checking",
                elapsed_s=elapsed,
                eta_s=(stop - row) * elapsed / done,
            )
        )
    return tally
