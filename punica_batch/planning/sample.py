"""Some rows of a job, spread over all of it, rendered and tokenized as the job would."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from punica_batch.data.source import Source
from punica_batch.planner.plan import Preview, PreviewToken
from punica_batch.planning.opened import OpenedJob
from punica_batch.planning.preflight import Preflight
from punica_batch.text.prepare import Preparer, render_preview

SAMPLE_ROWS = 2_000
SAMPLE_STRETCHES = 20  # of neighbouring rows: each costs a seek, and the decoding of a row group up to it
SAMPLE_SECONDS = 10.0
PREVIEW_TOKENS = 16
_BATCH_ROWS = 1024
_SEEK_ROWS = 65_536  # decoded between two looks at the clock


@dataclass(frozen=True, slots=True)
class RowSample:
    """``prompt_tokens[i]``, ``max_tokens[i]`` and ``samples[i]`` of each tokenized row that can run; ``errors``: rows
    of the sample that cannot, by code, those of bad adapters left out. ``rows``: read altogether."""

    rows: int
    prompt_tokens: list[int]
    max_tokens: list[int]
    samples: list[int]
    errors: Mapping[str, int]
    preview: Preview | None
    exact: bool

    @property
    def row_tokens(self) -> list[int]:
        """prompt + max_tokens, what a row's KV cache may grow to."""
        return [prompt + limit for prompt, limit in zip(self.prompt_tokens, self.max_tokens, strict=True)]

    @property
    def generated_tokens(self) -> list[int]:
        """The upper bound of each row: all its samples run to their max_tokens."""
        return [limit * n for limit, n in zip(self.max_tokens, self.samples, strict=True)]


def sample_rows(job: OpenedJob, found: Preflight, start: int, stop: int, *, exact: bool) -> RowSample:
    """About ``SAMPLE_ROWS`` of the rows ``start:stop`` (``exact``: all of them). Raises ``InputError`` or
    ``ModelError`` when a template or the tokenizer is wrong: that is all rows' fault."""
    preparer = Preparer(job.text_settings(found.specs, found.errors))
    adapter_codes = {error.partition(":")[0] for error in found.errors.values()}
    prompt_tokens, max_tokens, samples = [], [], []
    errors: Counter[str] = Counter()
    preview: Preview | None = None
    rows = position = 0
    deadline = None if exact else time.monotonic() + SAMPLE_SECONDS
    for first, last in [(start, stop)] if exact else stretches(start, stop):
        row = first
        if deadline is not None and not _reach(job.source, position, first, deadline):
            break
        for batch in job.source.work_batches(first, last, _BATCH_ROWS):
            prepared = preparer.prepare(batch, row)
            for request in prepared.requests:
                prompt_tokens.append(request.num_prompt_tokens)
                max_tokens.append(request.sampling.max_tokens)
                samples.append(request.sampling.n)
            errors.update(_code(result.error) for result in prepared.errors)
            if preview is None and prepared.requests:
                request = prepared.requests[0]
                tokens = render_preview(preparer, batch, request.row - row, PREVIEW_TOKENS)
                shown = tuple(PreviewToken(token_id, token) for token_id, token in tokens)
                preview = Preview(request.row, request.lora_id, shown)
            row += batch.num_rows
        rows += row - first
        position = row
        if deadline is not None and time.monotonic() > deadline:
            break
    row_errors = {code: number for code, number in errors.items() if code not in adapter_codes}
    return RowSample(rows, prompt_tokens, max_tokens, samples, row_errors, preview, exact=rows == stop - start)


def _reach(source: Source, position: int, row: int, deadline: float) -> bool:
    """Reads on to ``row``, from ``position`` or its row group's start, and looks at the clock on the way, which is long
    in a huge row group. False when the time is up."""
    for step in range(max(position, source.seek_start(row)), row, _SEEK_ROWS):
        if time.monotonic() > deadline:
            return False
        next(source.work_batches(step, step + 1))
    return True


def stretches(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Up to ``SAMPLE_STRETCHES`` ranges that hold ``SAMPLE_ROWS`` rows together, evenly spread over ``start:stop``."""
    rows = stop - start
    if rows <= SAMPLE_ROWS:
        if rows:
            yield start, stop
        return
    length = SAMPLE_ROWS // SAMPLE_STRETCHES
    for i in range(SAMPLE_STRETCHES):
        first = start + i * (rows - length) // (SAMPLE_STRETCHES - 1)
        yield first, first + length


def _code(error: str | None) -> str:
    assert error is not None
    return error.partition(":")[0]
