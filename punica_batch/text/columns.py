"""A batch's columns as Python lists, one conversion a column; what is wrong with a cell stands in its place."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from punica_batch.errors import RowError

ERROR_COLUMN = "__error__"  # a reader's ``code: sentence`` for a row that it could not read
MAX_CELL_BYTES = 16 << 20


def read_text(array: pa.Array, name: str) -> list[str | RowError | None]:
    """The column as text, null as None. Strings of any kind, dictionaries of them and binary are read as UTF-8;
    other types as Python prints them, nested ones as JSON.

    A cell in error is a ``RowError``: ``invalid_utf8``, or ``prompt_too_long`` above 16 MiB.
    """
    array = _plain(array)
    if pa.types.is_dictionary(array.type):
        return _look_up(read_text(array.dictionary, name), array)
    if not (_is_string(array.type) or _is_binary(array.type)):
        return [value if value is None or isinstance(value, RowError) else _print(value)
                for value in read_values(array, name)]  # fmt: skip
    big = pc.greater(pc.binary_length(array), MAX_CELL_BYTES)
    oversized = set(pc.indices_nonzero(big.fill_null(False)).to_pylist()) if len(array) else set()
    if oversized:
        array = pc.if_else(big, pa.scalar(None, array.type), array)
    values = _decode(array, name)
    for index in oversized:
        values[index] = RowError("prompt_too_long", f"column {name!r} holds more than {MAX_CELL_BYTES >> 20} MiB")
    return values


def _decode(array: pa.Array, name: str) -> list[str | RowError | None]:
    if _is_string(array.type):
        try:
            return array.to_pylist()  # type: ignore[no-any-return]
        except UnicodeDecodeError:
            array = array.cast(pa.large_binary() if array.type == pa.large_string() else pa.binary())
    values: list[str | RowError | None] = []
    for raw in array.to_pylist():
        try:
            values.append(None if raw is None else raw.decode())
        except UnicodeDecodeError as error:
            values.append(RowError("invalid_utf8", f"column {name!r} is not UTF-8 at byte {error.start}"))
    return values


def read_values(array: pa.Array, name: str) -> list[Any]:
    """The column as Python values, dictionaries decoded; a cell with invalid UTF-8 inside is a ``RowError``."""
    array = _plain(array)
    if pa.types.is_dictionary(array.type):
        return _look_up(read_values(array.dictionary, name), array)
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        return [_read_one(array, index, name) for index in range(len(array))]


def _read_one(array: pa.Array, index: int, name: str) -> Any:
    try:
        return array[index].as_py()
    except UnicodeDecodeError:
        return RowError("invalid_utf8", f"column {name!r} holds text that is not UTF-8")


def _look_up(values: list[Any], array: pa.DictionaryArray) -> list[Any]:
    """Each distinct value is converted once and shared by its rows."""
    return [None if index is None else values[index] for index in array.indices.to_pylist()]


def _plain(array: pa.Array) -> pa.Array:
    """Without extension type; views as binary."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_binary())
    return array


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary()) or bool(pa.types.is_fixed_size_binary(kind))


def _print(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else str(value)
