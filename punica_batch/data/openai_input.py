"""OpenAI Batch JSON lines as a table: one row a line that is not blank.

Columns: what a request needs, under the job's own column names (prompt *or* messages is non-null in a good row, then
the adapter's name and the per-row options), and what the answer needs: ``custom_id``, ``line`` (the raw text, carried
into a Parquet output), ``endpoint`` (``chat`` or ``completion``) and ``model`` (as the request said it). A line that is
not what it should be is that row's own error: ``__error__`` holds ``code: sentence``, null in good rows.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from punica_batch.config import JobConfig
from punica_batch.data.columns import ERROR_COLUMN, OPTIONS, WorkColumns, work_schema
from punica_batch.data.files import FileIdentity, InputFile, ends_digest, how_to_convert, read_error
from punica_batch.data.openai_request import parse_line
from punica_batch.data.paths import is_local
from punica_batch.errors import InputError

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
OPTION_TYPES = {
    "max_tokens": pa.int64(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int64(),
    "min_p": pa.float64(),
    "seed": pa.int64(),
    "stop": pa.list_(pa.string()),
    "n": pa.int64(),
}
_INDEX_ROWS = 1024  # a file offset is kept for every so many rows
_READ_ROWS = 256


class OpenAIInput:
    """``files`` as one table. Counting the rows reads the files once, in order."""

    def __init__(self, files: Sequence[InputFile], config: JobConfig) -> None:
        self._config = config
        self._files = [file.pinned() for file in files]
        self._first_rows: list[int] = []
        self._offsets: list[list[int]] = []  # of rows 0, 1024, 2048… of each file
        self.num_rows = 0
        identities: list[FileIdentity] = []
        for file in self._files:
            offsets, rows = _index(file)
            self._first_rows.append(self.num_rows)
            self._offsets.append(offsets)
            identities.append(file.identity(ends_digest(file), rows))
            self.num_rows += rows
        self.identities = tuple(identities)
        self.work = _work_columns(config)
        answer = [pa.field(name, pa.string()) for name in ("custom_id", "line", "endpoint", "model")]
        self.all_columns = pa.schema([*answer, *self.work.schema])
        self.schema = pa.schema([pa.field("custom_id", pa.string()), pa.field("line", pa.large_string())])

    def check_unchanged(self, start: int, stop: int) -> None:
        """Raise ``JobError`` when a file that holds some of rows ``start`` to ``stop - 1`` has changed."""
        for file in self._files_of(start, stop):
            file.check_unchanged()

    def _files_of(self, start: int, stop: int) -> Iterator[InputFile]:
        for file, first, identity in zip(self._files, self._first_rows, self.identities, strict=True):
            if first < stop and start < first + identity.rows:
                yield file

    def check(self, columns: Sequence[str]) -> None:
        """Nothing can differ between the files."""

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Batches of rows ``start`` to ``stop - 1`` with ``columns`` of ``schema``, ``all_columns`` or both."""
        types = {field.name: field.type for field in (*self.all_columns, *self.schema)}
        schema = pa.schema([pa.field(name, types[name]) for name in columns])
        lines = self._lines(start, stop)
        while rows := [parse_line(line, self._config) for line in islice(lines, _READ_ROWS)]:
            for file in self._files_of(start, start + len(rows)):
                if is_local(file.store):  # after reading, so that what is handed out is of the old content
                    file.check_unchanged()
            start += len(rows)
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    def _lines(self, start: int, stop: int) -> Iterator[bytes]:
        row = start
        while row < stop:
            number = bisect_right(self._first_rows, row) - 1
            file, local = self._files[number], row - self._first_rows[number]
            skip = local % _INDEX_ROWS
            file.check_unchanged()
            try:
                with file.open() as stream:
                    stream.seek(self._offsets[number][local // _INDEX_ROWS])
                    for line in stream:
                        if not line.strip():
                            continue
                        if skip:
                            skip -= 1
                            continue
                        yield line
                        row += 1
                        if row == stop:
                            return
            except OSError as error:
                raise read_error(file, error) from error
            if row < self._first_rows[number] + self.identities[number].rows:
                file.check_unchanged()
                raise InputError(f"{file.name} has become shorter since the job began")


def _index(file: InputFile) -> tuple[list[int], int]:
    """Offsets of every 1024th row, and the number of rows. Raises ``InputError`` for lines of another kind."""
    offsets: list[int] = []
    rows = position = 0
    try:
        with file.open() as stream:
            for line in stream:
                if line.strip():
                    if rows == 0:
                        _refuse_other_lines(file, line)
                    if rows % _INDEX_ROWS == 0:
                        offsets.append(position)
                    rows += 1
                position += len(line)
    except OSError as error:
        raise read_error(file, error) from error
    return offsets, rows


def _refuse_other_lines(file: InputFile, first: bytes) -> None:
    """A file of JSON lines that are no requests at all would fail row by row."""
    try:
        line: Any = json.loads(first.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return
    if isinstance(line, dict) and line and "custom_id" not in line and not isinstance(line.get("body"), dict):
        raise InputError(
            f"{file.name}: JSON lines are read as OpenAI Batch requests, and its first line has nothing of one "
            f"(custom_id, body); {how_to_convert(file, 'json')}"
        )


def _work_columns(config: JobConfig) -> WorkColumns:
    fields = [
        pa.field(config.prompt_column, pa.large_string()),
        pa.field(config.messages_column, MESSAGES),
        pa.field(config.lora_column, pa.string()),
        *(pa.field(name, OPTION_TYPES[name]) for name in OPTIONS),
    ]
    schema = work_schema(fields)
    return WorkColumns(False, tuple(name for name in schema.names if name != ERROR_COLUMN), schema)
