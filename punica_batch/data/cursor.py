"""Reading Parquet rows in order with bounded memory, from any row on.

Row groups before the first row wanted are never opened. Within a row group pyarrow can only read from its start, so a
cursor stays where it stopped: reading on from there, as the parts do one after the other, decodes each row once
whatever the size of the row groups. Page checksums are verified. A file that has changed since the job began gives no
more rows.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from punica_batch.data.files import InputFile, how_to_convert
from punica_batch.data.paths import is_local
from punica_batch.errors import InputError, JobError, StoreAway

READ_ROWS = 64  # rows decoded at a time: a value repeated through a dictionary can be huge whatever the footer says
READ_BUFFER_BYTES = 256 << 10
_RETRIES = 5
_SEPARATORS = {".csv": "", ".tsv": ', parse_options=r.ParseOptions(delimiter="\\t")'}


@dataclass(frozen=True)
class ParquetInput:
    """An opened-once Parquet file: ``first_row`` in the whole input, and where its row groups begin.

    ``group_starts`` int64 [row groups + 1], rows within the file; ``constants``: hive columns and their values.
    """

    file: InputFile
    first_row: int
    group_starts: NDArray[np.int64]
    constants: dict[str, pa.Scalar]

    @property
    def num_rows(self) -> int:
        return int(self.group_starts[-1])


def open_parquet(file: InputFile) -> pq.ParquetFile:
    """Raises ``InputError`` when it is no Parquet file, is cut short or cannot be opened."""
    source = file.path if is_local(file.store) else file.open()
    try:
        return pq.ParquetFile(source, pre_buffer=False, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise InputError(f"{file.name} is gone: was it moved while the job was running?") from error
    except (pa.ArrowException, OSError) as error:
        why = _other_kind(file) or f"not a readable Parquet file: {_reason(error)}"
        raise InputError(f"{file.name} is {why}") from error


def _other_kind(file: InputFile) -> str | None:
    """What to do with a file that by its name is none of Parquet."""
    suffix = os.path.splitext(file.path.removesuffix(".gz"))[1].lower()
    if suffix == ".json":
        return f"JSON, which is read of OpenAI Batch requests alone, called .jsonl: {how_to_convert(file, 'json')}"
    options = _SEPARATORS.get(suffix)
    return None if options is None else f"CSV, which is not read: {how_to_convert(file, 'csv', options)}"


class Cursor:
    """A position in ``inputs`` that reads ``schema``'s columns. One reader at a time."""

    def __init__(self, inputs: Sequence[ParquetInput], schema: pa.Schema) -> None:
        self._inputs = inputs
        self._starts = [one.first_row for one in inputs]
        self._schema = schema
        self.position = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._left: pa.RecordBatch | None = None
        self._group_stop = 0  # the open row group's last row + 1 in the whole input
        self._open: tuple[int, pq.ParquetFile] | None = None

    def seek(self, row: int) -> None:
        """Make ``row`` the next to be read."""
        if not (self.position <= row < self._group_stop):
            self._close_group(row)
        while self.position < row:
            self._read_once(row - self.position)

    def read(self, limit: int) -> pa.RecordBatch:
        """The next rows, at most ``limit`` and READ_ROWS, at least one.

        Raises ``JobError`` for a page that cannot be decoded, ``StoreAway`` when a store gives up.
        """
        wait = 0.5
        for attempt in range(_RETRIES + 1):
            position = self.position
            try:
                return self._read_once(limit)
            except StoreAway:
                if attempt == _RETRIES:
                    raise
                time.sleep(wait)
                wait *= 2
                self._close_group(position)
                self._open = None
                self.seek(position)
        raise AssertionError("unreachable")

    def _close_group(self, position: int) -> None:
        self._batches, self._left, self._group_stop = iter(()), None, 0
        self.position = position

    def _read_once(self, limit: int) -> pa.RecordBatch:
        if self._left is None:
            if self.position >= self._group_stop:
                self._open_group()
            self._left = self._next_batch()
            self._check_file()
        batch = self._left.slice(0, limit)
        self._left = self._left.slice(limit) if limit < self._left.num_rows else None
        self.position += batch.num_rows
        return batch

    def _open_group(self) -> None:
        """Open the row group that holds ``position`` and skip the rows of it that come before."""
        number = bisect_right(self._starts, self.position) - 1
        one = self._inputs[number]
        local = self.position - one.first_row
        group = int(np.searchsorted(one.group_starts, local, side="right")) - 1
        one.file.check_unchanged()
        if self._open is None or self._open[0] != number:
            self._open = number, open_parquet(one.file)
        self._group_stop = one.first_row + int(one.group_starts[group + 1])
        self._batches = self._group_batches(one, self._open[1], group)
        skip = local - int(one.group_starts[group])
        while skip:
            batch = self._next_batch()
            if batch.num_rows > skip:
                self._left = batch.slice(skip)
            skip -= min(skip, batch.num_rows)

    def _check_file(self) -> None:
        """After decoding, so that what is handed out is of the old content. A store is asked once a row group only."""
        assert self._open is not None
        file = self._inputs[self._open[0]].file
        if is_local(file.store):
            file.check_unchanged()

    def _next_batch(self) -> pa.RecordBatch:
        if self._left is not None:
            return self._left
        batch = next(self._batches, None)
        if batch is None:
            number = bisect_right(self._starts, self.position) - 1
            raise JobError(f"{self._inputs[number].file.name} has fewer rows than its footer says")
        return batch

    def _group_batches(self, one: ParquetInput, parquet: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch]:
        names = [name for name in self._schema.names if name not in one.constants]
        try:
            if names:
                batches = parquet.iter_batches(READ_ROWS, row_groups=[group], columns=names, use_threads=False)
                yield from (self._shape(batch, one) for batch in batches if batch.num_rows)
            else:
                for start in range(0, parquet.metadata.row_group(group).num_rows, READ_ROWS):
                    rows = min(READ_ROWS, parquet.metadata.row_group(group).num_rows - start)
                    yield self._shape(pa.RecordBatch.from_struct_array(pa.nulls(rows, pa.struct([]))), one)
        except (pa.ArrowException, OSError) as error:
            one.file.check_unchanged()
            raise _decode_error(one.file, group, error) from error

    def _shape(self, batch: pa.RecordBatch, one: ParquetInput) -> pa.RecordBatch:
        """``batch`` with exactly this cursor's schema: columns by name, hive columns added."""
        columns = []
        for field in self._schema:
            if field.name in one.constants:
                columns.append(pa.repeat(one.constants[field.name], batch.num_rows))
                continue
            column = batch.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _decode_error(file: InputFile, group: int, error: Exception) -> Exception:
    reason = _reason(error)
    if not is_local(file.store) and isinstance(error, OSError) and "CRC" not in reason and "Parquet" not in reason:
        return StoreAway(f"cannot read {file.name}: {reason}; run the same command again when the store answers")
    return JobError(f"{file.name}: row group {group} cannot be decoded ({reason}): the file is damaged, restore it")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
