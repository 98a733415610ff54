"""What ``punica-batch plan`` says, as data. ``plan --json`` prints ``Plan.to_json()``: this module is its schema.

Only arithmetic: the caller counts, reads headers and asks devices. Within a ``schema_version`` fields are added, never
renamed or removed. Sizes are bytes; a row's tokens are its prompt's, BOS included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from punica_batch.planner.memory import MemoryPlan
from punica_batch.planner.placement import Pack
from punica_batch.planner.window import DEFAULT_MAX_BYTES, DEFAULT_MAX_ROWS, SPAN_FACTOR

SCHEMA_VERSION = 1
TOP_ADAPTERS = 20


@dataclass(frozen=True, slots=True)
class InputFile:
    """``path`` as it was resolved, ``nbytes`` on disk, ``rows`` in the file (before ``--limit`` and ``--shard``)."""

    path: str
    nbytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class TokenEstimate:
    """Tokens of the whole job.

    ``prompt_tokens``: all prompts together; ``mean_prompt_tokens`` and ``max_prompt_tokens``: of one row;
    ``sampled_rows``: rows that were tokenized; ``exact``: they are all of them, else the total is scaled up;
    ``max_generated_tokens``: the upper bound, every sample running to its ``max_tokens``.
    """

    prompt_tokens: int
    mean_prompt_tokens: float
    max_prompt_tokens: int
    sampled_rows: int
    exact: bool
    max_generated_tokens: int


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """``lora_id`` (null: the base model), the ``rows`` that name it, its largest ``rank`` and packed ``nbytes`` (null
    for the base model or an adapter with a ``problem``), and the ``problem``: ``code: sentence``, null where none."""

    lora_id: str | None
    rows: int
    rank: int | None = None
    nbytes: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """The adapters that the job's rows name.

    ``count``: distinct ones, the base model not among them; ``base_rows``: rows without one; ``max_rank``: over the
    good ones (0: none); ``ranks``: rank → adapters that have it; ``top``: the 20 with most rows, most first;
    ``problems``: all that are missing or bad, most rows first; ``exact``: all rows were counted, else the row counts
    are those of the sample scaled up.
    """

    count: int
    base_rows: int
    max_rank: int
    ranks: dict[int, int]
    top: tuple[AdapterRows, ...]
    problems: tuple[AdapterRows, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class ExpectedErrors:
    """``rows`` expected to end as error rows, ``by_code``; the job stops if they exceed ``limit``
    (``--max-errors``): ``stops``. ``allowance``: in words, how the limit comes about."""

    rows: int
    by_code: dict[str, int]
    limit: int
    allowance: str

    @property
    def stops(self) -> bool:
        return self.rows > self.limit


@dataclass(frozen=True, slots=True)
class PlacementSummary:
    """``workers`` found on ``device`` (``cpu``, ``cuda``), their ``names``, how rows are packed (``pack``), and
    ``workers_used``: those that get rows at all."""

    device: str
    workers: int
    names: tuple[str, ...]
    pack: Pack
    workers_used: int


@dataclass(frozen=True, slots=True)
class WindowSummary:
    """At most ``max_rows`` rows and ``max_bytes`` are held in memory, and rows may run out of order within
    ``max_span`` rows (which bounds the journal); ``mean_group_rows``: rows of one adapter that
    meet in it on average, if the adapters are scattered evenly."""

    max_rows: int
    max_bytes: int
    mean_group_rows: float
    max_span: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The output: ``path``, ``count`` parts of ``rows_per_part`` input rows; ``single_file``: they become one file."""

    path: str
    count: int
    rows_per_part: int
    single_file: bool


@dataclass(frozen=True, slots=True)
class PreviewToken:
    id: int
    token: str


@dataclass(frozen=True, slots=True)
class Preview:
    """The first ``tokens`` of input row ``row`` as it is sent to the model, ``lora_id`` its adapter: a doubled BOS or
    a wrong template shows here."""

    row: int
    lora_id: str | None
    tokens: tuple[PreviewToken, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``run`` would do.

    - ``schema_version``: 1; ``model``: the model folder;
    - ``inputs``: the files; ``rows``: those of this job (after ``--limit`` and ``--shard``); ``samples``: sequences to
      generate (rows times n);
    - ``tokens``, ``adapters``, ``errors``, ``placement``, ``window``, ``parts``: see there;
    - ``memory``: of each worker (null where the device was not asked);
    - ``previews``: the first tokens of rendered rows; ``warnings``: sentences for the user;
    - ``option_columns``: the input's columns that are taken for options of their rows.
    """

    model: str
    inputs: tuple[InputFile, ...]
    rows: int
    samples: int
    tokens: TokenEstimate
    adapters: AdapterSummary
    errors: ExpectedErrors
    placement: PlacementSummary
    memory: MemoryPlan | None
    window: WindowSummary
    parts: Parts
    previews: tuple[Preview, ...] = ()
    warnings: tuple[str, ...] = ()
    option_columns: tuple[str, ...] = ()
    schema_version: int = field(default=SCHEMA_VERSION)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings, numbers, booleans and None; the keys are the fields' names."""
        plain: dict[str, Any] = _plain({"schema_version": self.schema_version, **asdict(self)})
        plain["errors"]["stops"] = self.errors.stops
        return plain


def token_estimate(
    prompt_tokens: Iterable[int], generated_tokens: Iterable[int], *, rows: int, exact: bool
) -> TokenEstimate:
    """From the tokenized rows' prompt lengths and their bounds on generated tokens (max_tokens times n), one each,
    for a job of ``rows`` rows."""
    lengths = list(prompt_tokens)
    bounds = list(generated_tokens)
    scale = rows / len(lengths) if lengths and not exact else 1.0
    return TokenEstimate(
        prompt_tokens=round(sum(lengths) * scale),
        mean_prompt_tokens=round(sum(lengths) / len(lengths), 2) if lengths else 0.0,
        max_prompt_tokens=max(lengths, default=0),
        sampled_rows=len(lengths),
        exact=exact,
        max_generated_tokens=round(sum(bounds) * scale),
    )


def adapter_summary(adapters: Iterable[AdapterRows], *, exact: bool) -> AdapterSummary:
    """From one entry for each distinct ``lora_id`` (the base model's included, if any row has none)."""
    everything = sorted(adapters, key=lambda entry: (-entry.rows, entry.lora_id or ""))
    named = [entry for entry in everything if entry.lora_id is not None]
    ranks = sorted(entry.rank for entry in named if entry.problem is None and entry.rank is not None)
    return AdapterSummary(
        count=len(named),
        base_rows=sum(entry.rows for entry in everything if entry.lora_id is None),
        max_rank=max(ranks, default=0),
        ranks={rank: ranks.count(rank) for rank in dict.fromkeys(ranks)},
        top=tuple(named[:TOP_ADAPTERS]),
        problems=tuple(entry for entry in named if entry.problem is not None),
        exact=exact,
    )


def expected_errors(
    adapters: AdapterSummary, row_errors: Mapping[str, int], *, limit: int, allowance: str
) -> ExpectedErrors:
    """Rows of bad adapters and ``row_errors``: the others that will fail, by code (scaled up where sampled)."""
    by_code = dict(row_errors)
    for entry in adapters.problems:
        code = (entry.problem or "").partition(":")[0]
        by_code[code] = by_code.get(code, 0) + entry.rows
    return ExpectedErrors(sum(by_code.values()), dict(sorted(by_code.items())), limit, allowance)


def placement_summary(
    device: str, names: Iterable[str], *, samples: int, max_num_seqs: int, pack: Pack
) -> PlacementSummary:
    """``busiest`` fills one worker's batch before the next gets a row; ``spread`` gives every worker a share."""
    workers = tuple(names)
    batches = -(-samples // max_num_seqs) if pack == "busiest" else samples
    return PlacementSummary(device, len(workers), workers, pack, min(batches, len(workers)))


def window_summary(
    rows: int, distinct: int, *, max_rows: int = DEFAULT_MAX_ROWS, max_bytes: int = DEFAULT_MAX_BYTES
) -> WindowSummary:
    """``distinct``: adapters, and the base model if rows use it. A steady window holds one turn's worth of each."""
    mean = round(min(rows, max_rows) / max(distinct, 1), 1)
    return WindowSummary(max_rows, max_bytes, mean, SPAN_FACTOR * max_rows)


def parts(path: str, rows: int, rows_per_part: int, *, single_file: bool) -> Parts:
    return Parts(path, -(-rows // rows_per_part), rows_per_part, single_file)


def _plain(value: Any) -> Any:
    """Tuples become lists and keys strings, as they would on the way through JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
