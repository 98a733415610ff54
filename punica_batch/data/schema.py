"""What the output's columns are, fixed before the first row, and how results become them.

Output = the input's columns (all, or ``--columns``), then the generation columns, each behind ``--output-prefix``.
The journal holds the same generation columns without the prefix, after ``row``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from punica_batch.config import JobConfig
from punica_batch.errors import InputError
from punica_batch.types import Completion, FinishReason, RowResult, TokenLogprobs

TOP_LOGPROB = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
# A sample's columns: one value a row, or a list of them where rows may ask for several samples.
SAMPLE_COLUMNS = (
    ("generation", pa.large_string()),
    ("finish_reason", pa.string()),
    ("completion_tokens", pa.int32()),
)
LOGPROB_COLUMNS = (
    ("token_ids", pa.list_(pa.int32())),
    ("token_logprobs", pa.list_(pa.float32())),
    ("top_logprobs", pa.list_(pa.list_(TOP_LOGPROB))),
)
_ORDER = ("generation", "finish_reason", "prompt_tokens", "completion_tokens", "error", "adapter_sha256")


def has_lists(source_schema: pa.Schema, config: JobConfig) -> bool:
    """Whether the columns of samples are lists: ``--n``, or an ``n`` column in the input."""
    return config.n is not None or "n" in source_schema.names


def result_schema(config: JobConfig, *, lists: bool) -> pa.Schema:
    """The generation columns, without prefix. ``lists``: each row holds a list of samples."""
    samples = dict(SAMPLE_COLUMNS) | (dict(LOGPROB_COLUMNS) if config.logprobs is not None else {})
    if lists:
        samples = {name: pa.list_(kind) for name, kind in samples.items()}
    types = {"prompt_tokens": pa.int32(), "error": pa.string(), "adapter_sha256": pa.string()} | samples
    names = (*_ORDER, *(name for name in samples if name not in _ORDER))
    return pa.schema([pa.field(name, types[name]) for name in names])


def output_schema(source_schema: pa.Schema, config: JobConfig, *, lists: bool | None = None) -> pa.Schema:
    """The output's schema; the input's field and schema metadata and nullability are kept.

    ``lists`` None: decided by ``has_lists``.

    Raises:
        InputError: ``--columns`` names a column that is not there, or an output column would hide an input column.
    """
    carried = carried_schema(source_schema, config)
    results = result_schema(config, lists=has_lists(source_schema, config) if lists is None else lists)
    added = [field.with_name(config.output_prefix + field.name) for field in results]
    hidden = [field.name for field in added if field.name in carried.names]
    if hidden:
        raise InputError(
            f"input column {hidden[0]!r} would be hidden by the output column of that name: "
            "give --output-prefix, rename it, or leave it out with --columns"
        )
    return pa.schema([*carried, *added], metadata=carried.metadata)


def carried_schema(source_schema: pa.Schema, config: JobConfig) -> pa.Schema:
    """The input columns that the output carries: all, or those of ``--columns`` behind the id column, if there is one,
    by which rows are joined to the rest again. Raises ``InputError`` for an unknown name in ``--columns``."""
    if config.columns is None:
        return source_schema
    for name in config.columns:
        if name not in source_schema.names:
            raise InputError(f"--columns: the input has no column {name!r}, only {', '.join(source_schema.names)}")
    metadata = {key: value for key, value in (source_schema.metadata or {}).items() if key != b"pandas"}
    ids = [config.id_column] if config.id_column in source_schema.names else []
    fields = [source_schema.field(name) for name in dict.fromkeys((*ids, *config.columns))]
    return pa.schema(fields, metadata=metadata or None)


def results_to_batch(results: Sequence[RowResult], schema: pa.Schema) -> pa.RecordBatch:
    """``results`` as a batch of ``schema``: ``result_schema``'s columns, and an int64 ``row`` if it names that."""
    lists = pa.types.is_list(schema.field("generation").type)
    build = _list_column if lists else _single_column
    return pa.record_batch([build(results, field) for field in schema], schema=schema)


_ROW_VALUES: dict[str, Callable[[RowResult], Any]] = {
    "row": lambda result: result.row,
    "prompt_tokens": lambda result: result.prompt_tokens,
    "error": lambda result: result.error,
    "adapter_sha256": lambda result: result.adapter_sha256,
}
_SAMPLE_VALUES: dict[str, Callable[[Completion], Any]] = {
    "generation": lambda sample: sample.text,
    "finish_reason": lambda sample: sample.finish_reason.value,
    "completion_tokens": lambda sample: len(sample.token_ids),
    "token_ids": lambda sample: sample.token_ids,
    "token_logprobs": lambda sample: _logprobs(sample).chosen,
}
_NO_LOGPROBS = TokenLogprobs((), ())


def _logprobs(sample: Completion) -> TokenLogprobs:
    return sample.logprobs or _NO_LOGPROBS


def _failed(name: str) -> str | None:
    return FinishReason.ERROR.value if name == "finish_reason" else None


def _single_column(results: Sequence[RowResult], field: pa.Field) -> pa.Array:
    if field.name in _ROW_VALUES:
        return pa.array(map(_ROW_VALUES[field.name], results), field.type)
    samples = [result.completions[0] if result.completions else None for result in results]
    if field.name == "top_logprobs":
        return _top_logprobs(samples)
    value, missing = _SAMPLE_VALUES[field.name], _failed(field.name)
    return pa.array((missing if sample is None else value(sample) for sample in samples), field.type)


def _list_column(results: Sequence[RowResult], field: pa.Field) -> pa.Array:
    if field.name in _ROW_VALUES:
        return _single_column(results, field)
    if field.name == "top_logprobs":
        flat = _top_logprobs([sample for result in results for sample in result.completions])
        return _nest(flat, [len(result.completions) if result.completions else None for result in results])
    value, missing = _SAMPLE_VALUES[field.name], _failed(field.name)
    absent = None if missing is None else [missing]
    rows = (list(map(value, result.completions)) if result.completions else absent for result in results)
    return pa.array(rows, field.type)


def _top_logprobs(samples: Sequence[Completion | None]) -> pa.Array:
    """list<list<struct>> [len(samples)], built from flat columns: far cheaper than a dict for each token."""
    tops = [None if sample is None else _logprobs(sample).top for sample in samples]
    tokens = [token for top in tops if top is not None for token in top]
    pairs = [pair for token in tokens for pair in token]
    ids = pa.array((token_id for token_id, _ in pairs), pa.int32())
    values = pa.array((logprob for _, logprob in pairs), pa.float32())
    structs = pa.StructArray.from_arrays([ids, values], fields=list(TOP_LOGPROB))
    return _nest(_nest(structs, map(len, tokens)), [None if top is None else len(top) for top in tops])


def _nest(values: pa.Array, lengths: Iterable[int | None]) -> pa.ListArray:
    """Lists of ``lengths`` (None: a null list) over ``values`` in turn."""
    known = list(lengths)
    offsets = pa.array(accumulate((length or 0 for length in known), initial=0), pa.int32())
    nulls = pa.array([length is None for length in known], pa.bool_())
    return pa.ListArray.from_arrays(offsets, values, type=pa.list_(values.type), mask=nulls)
