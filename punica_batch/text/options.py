"""Per-row sampling options: a row's own columns over its adapter's settings over the job's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa

from punica_batch.errors import RowError, UsageError
from punica_batch.text.columns import read_values
from punica_batch.types import AdapterSpec, SamplingParams


class _Wrong(Exception):
    """Says what the value should have been."""


def _integer(value: Any) -> int:
    if isinstance(value, (float, Decimal)) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("an integer")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise _Wrong("a number")
    return float(value)


def _stops(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise _Wrong("a non-empty string or a list of them")
    return tuple(values)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _integer, "temperature": _number, "top_p": _number, "top_k": _integer, "min_p": _number,
    "seed": _integer, "stop": _stops, "n": _integer,
}  # fmt: skip
OPTION_COLUMNS = tuple(_PARSERS)


class RowOptions:
    """The options of one batch's rows."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        names = [name for name in OPTION_COLUMNS if name in batch.schema.names]
        columns = [read_values(batch.column(name), name) for name in names]
        # Columns without a value cost nothing a row.
        self._columns = [(n, c) for n, c in zip(names, columns, strict=True) if any(v is not None for v in c)]
        self._made: dict[tuple[int, str], SamplingParams] = {}

    def sampling(self, index: int, base: SamplingParams) -> SamplingParams:
        """Row ``index``'s parameters; ``base`` is used where it says nothing. Raises ``RowError('bad_option')``.

        ``base`` must live as long as this object: rows that say the same on one base share their parameters.
        """
        if not self._columns:
            return base
        values = tuple(column[index] for _, column in self._columns)
        key = id(base), repr(values)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(values, base)
        return made

    def _make(self, values: tuple[Any, ...], base: SamplingParams) -> SamplingParams:
        changes = {}
        for (name, _), value in zip(self._columns, values, strict=True):
            if isinstance(value, RowError):
                raise value
            if value is not None:
                try:
                    changes[name] = _PARSERS[name](value)
                except _Wrong as error:
                    raise RowError("bad_option", f"column {name!r} must be {error}") from None
                except (ValueError, ArithmeticError):  # int() of a NaN or an infinity
                    raise RowError("bad_option", f"column {name!r} must be a finite number") from None
        try:
            return replace(base, **changes) if changes else base
        except UsageError as error:
            name, _, want = str(error).partition(", not ")[0].partition(" must be ")
            raise RowError("bad_option", f"column {name!r} must be {want}") from None


def adapter_defaults(base: SamplingParams, spec: AdapterSpec | None) -> SamplingParams:
    """The job's parameters with the adapter's ``max_tokens`` and ``stop`` where it has them (``UsageError``)."""
    if spec is None or (spec.max_tokens is None and spec.stop is None):
        return base
    return replace(
        base,
        max_tokens=base.max_tokens if spec.max_tokens is None else spec.max_tokens,
        stop=base.stop if spec.stop is None else spec.stop,
    )
