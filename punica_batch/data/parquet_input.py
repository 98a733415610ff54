"""Parquet files as one table: schemas matched by name, hive columns added, rows streamed in order."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from punica_batch.data.cursor import Cursor, ParquetInput, open_parquet
from punica_batch.data.files import FileIdentity, InputFile, read_error
from punica_batch.errors import InputError

_FOOTER_TAIL = 8  # length of the footer, then "PAR1"
_THREADS = 16
_CURSORS_KEPT = 4


@dataclass(frozen=True)
class _Footer:
    file: InputFile
    schema: pa.Schema
    group_rows: np.ndarray[Any, np.dtype[np.int64]]
    identity: FileIdentity


class ParquetTable:
    """``files`` as one table of ``schema``; the first file's column order, types and metadata rule.

    Raises ``InputError`` naming file and column when they do not fit together.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        with ThreadPoolExecutor(min(_THREADS, len(files))) as pool:
            footers = list(pool.map(_read_footer, files))
        files = [footer.file for footer in footers]
        self._files = tuple(files)
        self._footers = footers
        self.identities = tuple(footer.identity for footer in footers)
        constants = _hive_columns(files, footers[0].schema)
        first = footers[0].schema
        hive = [pa.field(name, values[0].type) for name, values in constants.items()]
        self.schema = pa.schema([*first, *hive], metadata=_kept_metadata(first))
        self._inputs: list[ParquetInput] = []
        self.num_rows = 0
        for number, (file, footer) in enumerate(zip(files, footers, strict=True)):
            starts = np.concatenate([[0], np.cumsum(footer.group_rows)])
            values = {name: column[number] for name, column in constants.items()}
            if footer.identity.rows:
                self._inputs.append(ParquetInput(file, self.num_rows, starts, values))
            self.num_rows += footer.identity.rows
        self._idle: list[tuple[tuple[str, ...], Cursor]] = []

    def check(self, columns: Iterable[str]) -> None:
        """Raise ``InputError`` unless every file has ``columns``, each with the first file's type.

        A column that only some files have counts as missing in the others.
        """
        wanted = set(columns)
        first_name = self._files[0].name
        nullable = {field.name for field in self.schema if field.nullable}
        for file, footer in zip(self._files, self._footers, strict=True):
            here = {field.name: field for field in footer.schema}
            partition = {name for name, _ in file.partition}
            for name in self.schema.names:
                if name in wanted and name not in here and name not in partition:
                    raise InputError(f"{file.name} has no column {name!r}, which {first_name} has")
                if name in wanted and name in here and here[name].type != self.schema.field(name).type:
                    want = self.schema.field(name).type
                    raise InputError(
                        f"{file.name}: column {name!r} is {here[name].type}, but {want} in {first_name}; cast one"
                    )
                if name in here and here[name].nullable:
                    nullable.add(name)
            extra = next((name for name in here if name not in self.schema.names), None)
            if extra is not None and wanted.issuperset(self.schema.names):
                raise InputError(f"{first_name} has no column {extra!r}, which {file.name} has")
        fields = [field.with_nullable(field.name in nullable) for field in self.schema]
        self.schema = pa.schema(fields, metadata=self.schema.metadata)
        self._footers = []

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Small batches of rows ``start`` to ``stop - 1``; a later call that begins where one ended reads on."""
        key = tuple(columns)
        cursor = self._take_cursor(key)
        try:
            if start < stop:
                cursor.seek(start)
            while cursor.position < stop and start < stop:
                yield cursor.read(stop - cursor.position)
        finally:
            self._idle.append((key, cursor))
            del self._idle[:-_CURSORS_KEPT]

    def check_unchanged(self, start: int, stop: int) -> None:
        """Raise ``JobError`` when a file that holds some of rows ``start`` to ``stop - 1`` has changed."""
        for one in self._inputs:
            if one.first_row < stop and start < one.first_row + one.num_rows:
                one.file.check_unchanged()

    def group_start(self, row: int) -> int:
        """The first row of the row group that holds ``row``: to read ``row``, all from there on must be decoded."""
        one = self._inputs[bisect_right([one.first_row for one in self._inputs], row) - 1]
        group = int(np.searchsorted(one.group_starts, row - one.first_row, side="right")) - 1
        return one.first_row + int(one.group_starts[group])

    def _take_cursor(self, key: tuple[str, ...]) -> Cursor:
        for entry in self._idle:
            if entry[0] == key:
                self._idle.remove(entry)
                return entry[1]
        fields = [self.schema.field(name) for name in key]
        return Cursor(self._inputs, pa.schema(fields, metadata=self.schema.metadata))


def _read_footer(file: InputFile) -> _Footer:
    file = file.pinned()
    parquet = open_parquet(file)
    try:
        metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = np.array([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], dtype=np.int64)
        names = schema.names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{file.name} has two columns named {twice!r}: rename one")
        return _Footer(file, schema, rows, file.identity(_footer_bytes(file), int(rows.sum())))
    finally:
        parquet.close(force=True)


def _footer_bytes(file: InputFile) -> bytes:
    try:
        with file.open() as stream:
            stream.seek(file.size - _FOOTER_TAIL)
            length = int.from_bytes(stream.read(4), "little")
            stream.seek(max(0, file.size - _FOOTER_TAIL - length))
            return bytes(stream.read(length))
    except OSError as error:
        raise read_error(file, error) from error


def _kept_metadata(schema: pa.Schema) -> dict[bytes, bytes] | None:
    return dict(schema.metadata) if schema.metadata else None


def _hive_columns(files: Sequence[InputFile], schema: pa.Schema) -> dict[str, list[pa.Scalar]]:
    """Each hive column's value for every file, typed as all its values allow: int64, or else string.

    A column that the files hold themselves is read from them.
    """
    names = [name for name, _ in files[0].partition]
    for file in files:
        here = [name for name, _ in file.partition]
        if set(here) != set(names) or len(set(here)) != len(here):
            odd = next(iter(set(here) ^ set(names)), here[0] if here else "")
            raise InputError(f"{file.name}: not all files are in a folder {odd}=…, once each: give one kind of folders")
    columns = {}
    for name in names:
        if name in schema.names:
            continue
        values = [dict(file.partition)[name] for file in files]
        numbers = all(value is None or re.fullmatch(r"-?\d{1,18}", value) for value in values)
        if numbers and any(value is not None for value in values):
            columns[name] = [pa.scalar(None if value is None else int(value), pa.int64()) for value in values]
        else:
            columns[name] = [pa.scalar(value, pa.string()) for value in values]
    return columns
