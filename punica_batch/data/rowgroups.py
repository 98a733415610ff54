"""Rows into the row groups of a part: the same rows give the same groups and bytes, however they were batched.

A group ends at 16384 rows or 32 MiB of values, counted in granules of 64 rows from the part's first row; so how the
input was cut into row groups, and how it was read, leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

GRANULE_ROWS = 64
GROUP_ROWS = 16_384
GROUP_BYTES = 32 << 20


def row_groups(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, rows: int = GROUP_ROWS, size: int = GROUP_BYTES
) -> Iterator[pa.Table]:
    """Tables of one chunk a column, each to be one row group; ``rows`` is a multiple of the granule."""
    held: list[pa.RecordBatch] = []
    held_rows = held_bytes = 0
    for piece in _granules(batches):
        held.append(piece)
        held_rows += piece.num_rows
        held_bytes += sum(data_bytes(column) for column in piece.columns)
        if held_rows % GRANULE_ROWS == 0 and (held_rows >= rows or held_bytes >= size):
            yield from _one_chunk(pa.Table.from_batches(held, schema))
            held, held_rows, held_bytes = [], 0, 0
    if held:
        yield from _one_chunk(pa.Table.from_batches(held, schema))


def _granules(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """``batches`` cut where a granule ends."""
    filled = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            piece = batch.slice(start, GRANULE_ROWS - filled)
            yield piece
            start += piece.num_rows
            filled = (filled + piece.num_rows) % GRANULE_ROWS


def data_bytes(array: pa.Array) -> int:
    """Bytes of ``array``'s values: a sum over its rows alone. A dictionary's own values are not counted."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return data_bytes(array.storage)
    if pt.is_null(kind):
        return 0
    if pt.is_dictionary(kind):
        return data_bytes(array.indices)
    if pt.is_struct(kind):
        return sum(data_bytes(child) for child in array.flatten())
    if pt.is_map(kind):
        first, last = (array.offsets[i].as_py() for i in (0, -1))
        children = array.keys.slice(first, last - first), array.items.slice(first, last - first)
        return 8 * len(array) + sum(map(data_bytes, children))
    if pt.is_nested(kind):
        return 8 * len(array) + data_bytes(array.flatten())
    if pt.is_boolean(kind):
        return len(array)
    if pt.is_primitive(kind) or pt.is_decimal(kind) or pt.is_fixed_size_binary(kind):
        return int(len(array) * kind.bit_width // 8)
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        array = array.cast(pa.large_binary())
    return 4 * len(array) + int(pc.sum(pc.binary_length(array)).as_py() or 0)


def _one_chunk(table: pa.Table) -> Iterator[pa.Table]:
    """``table`` with one chunk a column; in halves where dictionaries do not fit into one of their index type."""
    try:
        combined = table.combine_chunks()
    except pa.ArrowInvalid:
        if table.num_rows > GRANULE_ROWS:
            half = table.num_rows // 2 // GRANULE_ROWS * GRANULE_ROWS or GRANULE_ROWS
            yield from _one_chunk(table.slice(0, half))
            yield from _one_chunk(table.slice(half))
            return
        combined = pa.table([_compacted(column) for column in table.columns], schema=table.schema).combine_chunks()
    columns = [_compacted(column) if _has_long_dictionary(column) else column for column in combined.columns]
    yield pa.table(columns, schema=table.schema).combine_chunks()


def _has_long_dictionary(column: pa.ChunkedArray) -> bool:
    return bool(pt.is_dictionary(column.type) and column.num_chunks and len(column.chunk(0).dictionary) > len(column))


def _compacted(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A dictionary column with only the values that occur, in their order in the dictionaries."""
    if not pt.is_dictionary(column.type):
        return column
    chunks = []
    for chunk in column.chunks:
        used = pc.array_sort_indices(pc.unique(chunk.indices.drop_null()))
        old = pc.take(pc.unique(chunk.indices.drop_null()), used)
        indices = pc.index_in(chunk.indices, value_set=old).cast(column.type.index_type)
        chunks.append(pa.DictionaryArray.from_arrays(indices, chunk.dictionary.take(old), ordered=column.type.ordered))
    return pa.chunked_array(chunks, type=column.type)
