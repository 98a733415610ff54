"""Inputs as one long table: rows numbered from 0 in a fixed order, streamed from any row with bounded memory.

``Source.open`` reads footers only (JSON lines are counted once) and refuses what is wrong before any work: no files,
a column that is missing or has another type in one of the files, a work column of a wrong type. Files are matched by
column name. All types, field and schema metadata come out as the files have them.

Two ways to read: ``batches`` gives columns in the files' own types, for the output to carry; ``work_batches`` gives
what requests are made from, in one common form (see ``columns``), for the text processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import pyarrow as pa

from punica_batch.config import JobConfig
from punica_batch.data.columns import ERROR_COLUMN, OPTIONS, WorkColumns, find_work_columns, to_work
from punica_batch.data.files import FileIdentity, find_files
from punica_batch.data.openai_input import OpenAIInput
from punica_batch.data.parquet_input import ParquetTable
from punica_batch.data.schema import carried_schema, has_lists

_BATCH_BYTES = 16 << 20


class Source:
    """The job's input. ``num_rows`` is after ``--limit``; ``schema`` holds the columns that the output may carry."""

    def __init__(self, table: ParquetTable | OpenAIInput, work: WorkColumns, config: JobConfig) -> None:
        self._table = table
        self._config = config
        self._work = work
        self.schema: pa.Schema = table.schema
        self.num_rows = table.num_rows if config.limit is None else min(table.num_rows, config.limit)
        self.files: tuple[FileIdentity, ...] = table.identities

    @classmethod
    def open(cls, config: JobConfig, templates: Sequence[str] = ()) -> Source:
        """Open ``config.inputs``.

        ``templates``: the adapters' prompt templates; a column whose name stands in one of them, or in
        ``config.prompt_template``, becomes a work column.

        Raises ``InputError`` or ``UsageError`` before any work; ``StoreAway`` when a store does not answer.
        """
        files = find_files(config)
        if files[0].is_jsonl:
            openai = OpenAIInput(files, config)
            return cls(openai, openai.work, config)
        table = ParquetTable(files)
        texts = [*templates, *filter(None, [config.prompt_template])]
        explicit = frozenset(config.model_fields_set)
        work = find_work_columns(table.schema, config, texts, explicit, files[0].name)
        table.check({*work.names, *carried_schema(table.schema, config).names})
        return cls(table, work, config)

    @property
    def kind(self) -> Literal["parquet", "openai"]:
        return "openai" if isinstance(self._table, OpenAIInput) else "parquet"

    @property
    def is_messages(self) -> bool:
        """Whether rows hold messages; of OpenAI rows, each holds a prompt or messages (False here)."""
        return self._work.is_messages

    @property
    def work_columns(self) -> tuple[str, ...]:
        """Names of the columns that making requests needs, ``__error__`` left out."""
        return self._work.names

    @property
    def option_columns(self) -> tuple[str, ...]:
        """The columns that are taken for options of their rows (of OpenAI rows those are in the body: none here)."""
        return () if self.kind == "openai" else tuple(name for name in OPTIONS if name in self._work.names)

    @property
    def work_schema(self) -> pa.Schema:
        """The schema of ``work_batches``: the work columns in their common types, then ``__error__``."""
        return self._work.schema

    @property
    def lists(self) -> bool:
        """Whether the output's sample columns are lists: rows may ask for several samples."""
        return self.kind == "openai" or has_lists(self.schema, self._config)

    def batches(
        self, start: int, stop: int, columns: Sequence[str] | None = None, batch_rows: int = 2048
    ) -> Iterator[pa.RecordBatch]:
        """Rows ``start`` to ``stop - 1`` in order, in the files' own types; ``columns`` None: all of ``schema``.

        Batches hold at most ``batch_rows`` rows and about 16 MiB. Reading on from where an earlier call with the same
        columns stopped costs nothing extra. Raises ``JobError`` naming file and row group when a page is damaged.
        """
        names = self.schema.names if columns is None else list(columns)
        return _combined(self._table.read(start, min(stop, self.num_rows), names), batch_rows)

    def check_unchanged(self, start: int, stop: int) -> None:
        """Raises ``JobError`` when a file that holds some of rows ``start`` to ``stop - 1`` has changed."""
        self._table.check_unchanged(start, stop)

    def seek_start(self, row: int) -> int:
        """Where reading has to begin for ``row`` to be reached: its row group's first row (of JSON lines: itself)."""
        return row if isinstance(self._table, OpenAIInput) else self._table.group_start(row)

    def work_batches(self, start: int, stop: int, batch_rows: int = 2048) -> Iterator[pa.RecordBatch]:
        """Rows ``start`` to ``stop - 1`` in order as batches of ``work_schema``."""
        if isinstance(self._table, OpenAIInput):
            yield from self.batches(start, stop, (*self.work_columns, ERROR_COLUMN), batch_rows)
            return
        for batch in self.batches(start, stop, self.work_columns, batch_rows):
            yield to_work(batch, self._work)


def _combined(pieces: Iterable[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """``pieces`` put together to batches of ``batch_rows`` rows, or fewer where they are big."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for piece in pieces:
        while piece.num_rows:
            part = piece.slice(0, batch_rows - rows)
            piece = piece.slice(part.num_rows)
            held.append(part)
            rows += part.num_rows
            size += part.nbytes
            if rows == batch_rows or size >= _BATCH_BYTES:
                yield from concatenate(held)
                held, rows, size = [], 0, 0
    yield from concatenate(held)


def concatenate(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """One batch of all, or ``batches`` themselves where their dictionaries cannot become one."""
    if len(batches) <= 1:
        return batches
    try:
        return list(pa.Table.from_batches(batches).combine_chunks().to_batches())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return batches
