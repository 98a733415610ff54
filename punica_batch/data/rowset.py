"""``RowSet``: which rows are there, at one bit a row and nothing for what was never added."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

_CHUNK = 1 << 16  # rows in one bitmap
_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


class RowSet:
    """A set of row numbers (0 or more), in bitmaps of 65536 rows made when first needed."""

    def __init__(self) -> None:
        self._chunks: dict[int, NDArray[np.uint8]] = {}

    def add(self, row: int) -> None:
        chunk, offset = divmod(row, _CHUNK)
        self._chunk(chunk)[offset >> 3] |= np.uint8(1 << (offset & 7))

    def discard(self, row: int) -> None:
        chunk, offset = divmod(row, _CHUNK)
        if chunk in self._chunks:
            self._chunks[chunk][offset >> 3] &= np.uint8(~(1 << (offset & 7)) & 0xFF)

    def add_many(self, rows: ArrayLike) -> None:
        numbers = np.asarray(rows, dtype=np.int64)
        for chunk, offsets in _by_chunk(numbers):
            bits = np.bitwise_left_shift(np.uint8(1), (offsets & 7).astype(np.uint8))
            np.bitwise_or.at(self._chunk(chunk), offsets >> 3, bits)

    def add_range(self, start: int, stop: int) -> None:
        """Add rows ``start`` to ``stop - 1``."""
        for chunk, low, high in _ranges(start, stop):
            flags = self._flags(chunk)
            flags[low:high] = True
            self._chunks[chunk] = np.packbits(flags, bitorder="little")

    def __contains__(self, row: int) -> bool:
        chunk, offset = divmod(row, _CHUNK)
        bitmap = self._chunks.get(chunk)
        return bitmap is not None and bool(bitmap[offset >> 3] >> (offset & 7) & 1)

    def contains_many(self, rows: ArrayLike) -> NDArray[np.bool_]:
        """bool [len(rows)]: which of ``rows`` are in the set."""
        numbers = np.asarray(rows, dtype=np.int64)
        found = np.zeros(len(numbers), dtype=np.bool_)
        for chunk, bitmap in self._chunks.items():
            here = numbers // _CHUNK == chunk
            if here.any():
                offsets = numbers[here] % _CHUNK
                found[here] = (bitmap[offsets >> 3] >> (offsets & 7).astype(np.uint8)) & 1
        return found

    def count(self, start: int, stop: int) -> int:
        """How many of rows ``start`` to ``stop - 1`` are in the set."""
        total = 0
        for chunk, low, high in _ranges(start, stop):
            if chunk not in self._chunks:
                continue
            if high - low == _CHUNK:
                total += int(_POPCOUNT[self._chunks[chunk]].sum(dtype=np.int64))
            else:
                total += int(np.count_nonzero(self._flags(chunk)[low:high]))
        return total

    def missing(self, start: int, stop: int) -> NDArray[np.int64]:
        """int64: the rows from ``start`` to ``stop - 1`` that are not in the set, ascending."""
        parts = [
            np.flatnonzero(~self._flags(chunk)[low:high]) + (chunk * _CHUNK + low)
            for chunk, low, high in _ranges(start, stop)
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def first_missing(self, start: int) -> int:
        """The first row from ``start`` on that is not in the set."""
        chunk, low = divmod(start, _CHUNK)
        while chunk in self._chunks:
            absent = np.flatnonzero(~self._flags(chunk)[low:])
            if len(absent):
                return chunk * _CHUNK + low + int(absent[0])
            chunk, low = chunk + 1, 0
        return chunk * _CHUNK + low

    def __len__(self) -> int:
        return sum(int(_POPCOUNT[bitmap].sum(dtype=np.int64)) for bitmap in self._chunks.values())

    def __iter__(self) -> Iterator[int]:
        for chunk in sorted(self._chunks):
            yield from (int(offset) + chunk * _CHUNK for offset in np.flatnonzero(self._flags(chunk)))

    def _chunk(self, chunk: int) -> NDArray[np.uint8]:
        bitmap = self._chunks.get(chunk)
        if bitmap is None:
            bitmap = self._chunks[chunk] = np.zeros(_CHUNK // 8, dtype=np.uint8)
        return bitmap

    def _flags(self, chunk: int) -> NDArray[np.bool_]:
        """A copy, bool [65536]."""
        bitmap = self._chunks.get(chunk)
        if bitmap is None:
            return np.zeros(_CHUNK, dtype=np.bool_)
        return np.unpackbits(bitmap, bitorder="little").view(np.bool_)


def _by_chunk(rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    chunks = rows // _CHUNK
    for chunk in np.unique(chunks):
        yield int(chunk), rows[chunks == chunk] % _CHUNK


def _ranges(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(chunk, low, high) pieces of rows ``start`` to ``stop - 1``, ``low`` and ``high`` within the chunk."""
    while start < stop:
        chunk, low = divmod(start, _CHUNK)
        high = min(_CHUNK, low + stop - start)
        yield chunk, low, high
        start += high - low
