"""Before any GPU work: which adapters the rows name, which of these are bad, and whether that is too much."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from punica_batch.adapters.check import AdapterReport, check_adapters
from punica_batch.adapters.registry import Registry
from punica_batch.config import JobConfig
from punica_batch.data.source import Source
from punica_batch.errors import RowError, ValidationError, ended
from punica_batch.models.config import ModelConfig
from punica_batch.planning.adapters import rank_problem
from punica_batch.planning.opened import OpenedJob
from punica_batch.text.templates import check_text
from punica_batch.types import AdapterSpec

COUNT_SECONDS = 20.0  # with the sample's seconds: the first row starts within a minute, however many there are
_COUNT_ROWS = 65_536
BAD_ADAPTER = "adapter_unreadable"


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """How many rows name each adapter. ``rows``: ``lora_id`` → rows (None: the base model; null and "" alike).
    ``counted`` rows were read; ``exact``: they are all. Row counts are as counted, not scaled up."""

    rows: Mapping[str | None, int]
    counted: int
    exact: bool

    def names(self) -> list[str]:
        """Most rows first."""
        named = [(name, rows) for name, rows in self.rows.items() if name is not None]
        return [name for name, _ in sorted(named, key=lambda item: (-item[1], item[0]))]


@dataclass(frozen=True, slots=True)
class Preflight:
    """``specs``: the good adapters that rows name; ``errors``: the others, with the ``code: sentence`` that their rows
    get; ``reports``: of those that are in the registry, by name; ``failing_rows``: rows that name a bad one."""

    use: AdapterUse
    specs: Mapping[str, AdapterSpec]
    reports: Mapping[str, AdapterReport]
    errors: Mapping[str, str]
    failing_rows: int
    warnings: tuple[str, ...] = field(default=())

    @property
    def max_rank(self) -> int:
        """The largest rank of the good adapters; 0 where there are none."""
        return max((self.reports[name].rank for name in self.specs), default=0)


def preflight(job: OpenedJob, start: int, stop: int) -> Preflight:
    """Counts the adapters of the rows ``start:stop`` and checks each one's config and header against the model.

    Raises ``InputError`` for a template that no row could be rendered with, ``StoreAway`` when a store does not
    answer; see ``refuse_if_too_many`` for what to do about bad ones.
    """
    use = count_adapters(job.source, job.config, start, stop)
    specs, errors = find_specs(job.registry, use.names())
    reports = check_reports(specs, job.config, job.model)
    for name, report in reports.items():
        problem = report.error or rank_problem(name, report.rank, job.config)
        if problem is not None:
            errors[name] = str(RowError(BAD_ADAPTER, problem))
    good = {name: spec for name, spec in specs.items() if name not in errors}
    columns = job.source.work_columns if job.source.kind == "openai" else job.source.schema.names
    check_text(job.text_settings(good, errors), columns, [name for name in use.rows if name not in errors])
    return Preflight(
        use=use,
        specs=good,
        reports=reports,
        errors=errors,
        failing_rows=sum(use.rows[name] for name in errors),
        warnings=(*column_warnings(job), *_frame_warnings(job, good), *_warnings(reports)),
    )


def column_warnings(job: OpenedJob) -> list[str]:
    """Of adapters that no row can name. Costs nothing: a finished output is told of it again."""
    config, names = job.config, job.source.schema.names
    has_adapters = config.adapters is not None or bool(config.lora_modules)
    if not has_adapters or job.source.kind != "parquet" or config.lora_column in names:
        return []
    near = difflib.get_close_matches(config.lora_column, names, n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]!r} (--lora-column {near[0]})?" if near else ""
    missing = ended(f"adapters are configured, but the input has no column {config.lora_column!r}{hint}")
    return [f"{missing} All rows use the base model"]


def _frame_warnings(job: OpenedJob, named: Mapping[str, AdapterSpec]) -> list[str]:
    """What is likely to be meant otherwise. ``named``: the good adapters that rows name."""
    config = job.config
    found = []
    templated = [name for name, spec in named.items() if spec.prompt_template is not None]
    if templated and config.apply_chat_template and not job.source.is_messages:
        found.append(
            f"the prompt_template of {_some(templated)} and --apply-chat-template are both in force: the text that the "
            "prompt template makes becomes the user message of a chat"
        )
    return found


def _some(names: list[str]) -> str:
    return f"adapter {names[0]!r}" if len(names) == 1 else f"{len(names)} adapters ({names[0]!r} …)"


def _warnings(reports: Mapping[str, AdapterReport]) -> tuple[str, ...]:
    """One sentence for all adapters that it is true of: a thousand may share a fault."""
    names: dict[str, list[str]] = {}
    for name, report in reports.items():
        for line in report.warnings:
            names.setdefault(line, []).append(name)
    return tuple(f"{_some(found)}: {line}" for line, found in names.items())


def refuse_if_too_many(found: Preflight, config: JobConfig, rows: int) -> None:
    """Raises ``ValidationError`` when the rows of bad adapters exceed ``--max-errors`` of ``rows``, or any with
    ``--on-error raise``."""
    limit = allowed_failures(config, rows)
    if found.failing_rows <= limit:
        return
    worst = max(found.errors, key=lambda name: found.use.rows[name])
    more = len(found.errors) - 1
    others = f" (and {more} more adapter{'s' if more > 1 else ''})" if more else ""
    raise ValidationError(
        f"{found.failing_rows:,} of {_rows(rows)} would fail, {allowance(config, rows)}: "
        f"{ended(found.errors[worst] + others)} Run `punica-batch validate` for the whole list"
    )


def allowed_failures(config: JobConfig, rows: int) -> int:
    """How many of ``rows`` may fail before the job stops."""
    return 0 if config.on_error == "raise" else config.error_limit(rows)


def allowance(config: JobConfig, rows: int) -> str:
    """``allowed_failures`` in words, with the flag that it comes from: ``--max-errors 5% of 100 rows allows 5``."""
    if config.on_error == "raise":
        return "--on-error raise allows none"
    of = f" {config.max_errors} of {_rows(rows)}" if config.max_errors.endswith("%") else ""
    return f"--max-errors{of} allows {config.error_limit(rows):,}"


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"


def count_adapters(
    source: Source, config: JobConfig, start: int, stop: int, *, seconds: float = COUNT_SECONDS
) -> AdapterUse:
    """Reads the adapters' column of the rows ``start:stop``, and no other; stops after ``seconds``."""
    column = config.lora_column
    if column not in source.work_columns:
        return AdapterUse({None: stop - start}, stop - start, exact=True)
    counts: Counter[str | None] = Counter()
    counted, deadline = 0, time.monotonic() + seconds
    for batch in source.batches(start, stop, [column], batch_rows=_COUNT_ROWS):
        counts.update(_value_counts(batch.column(0)))
        counted += batch.num_rows
        if time.monotonic() > deadline:
            break
    return AdapterUse(dict(counts), counted, exact=counted == stop - start)


def find_specs(registry: Registry, names: list[str]) -> tuple[dict[str, AdapterSpec], dict[str, str]]:
    """(those in the registry, the others with the error that their rows get)"""
    specs, errors = {}, {}
    for name in names:
        try:
            specs[name] = registry.get(name)
        except RowError as error:
            errors[name] = str(error)
    return specs, errors


def check_reports(specs: Mapping[str, AdapterSpec], config: JobConfig, model: ModelConfig) -> dict[str, AdapterReport]:
    reports = check_adapters(specs.values(), model.lora_modules(), config.model, config.storage_options)
    return {report.name: report for report in reports}


def _value_counts(column: pa.Array) -> dict[str | None, int]:
    """Text → how often; "" counts as null. Text that is not UTF-8 is left out: its rows fail by themselves."""
    while isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    counts: dict[str | None, int] = {}
    for entry in pc.value_counts(column.cast(pa.large_binary())):
        value = entry["values"].as_py()
        try:
            name = value.decode() if value else None
        except UnicodeDecodeError:
            continue
        counts[name] = counts.get(name, 0) + entry["counts"].as_py()
    return counts
