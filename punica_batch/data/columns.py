"""The columns that making requests needs (*work columns*): which they are, their types, and one common form.

A work batch has the prompt as large_string (whatever text or binary type the file uses) or the messages as they are,
the adapter's name as string, per-row options as int64, float64 or list<string>, template columns as large_string where
they are text and else as they are, and ``__error__`` (string): null, or why this row cannot be run, as
``code: sentence``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from punica_batch.config import JobConfig
from punica_batch.errors import InputError

ERROR_COLUMN = "__error__"
INTEGERS = ("max_tokens", "top_k", "seed", "n")
FLOATS = ("temperature", "top_p", "min_p")
OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n")


@dataclass(frozen=True)
class WorkColumns:
    """Names of the work columns, in the input's order within each kind, and their common types."""

    is_messages: bool
    names: tuple[str, ...]
    schema: pa.Schema


def find_work_columns(
    schema: pa.Schema, config: JobConfig, templates: Sequence[str], explicit: frozenset[str], where: str
) -> WorkColumns:
    """Choose and type-check the work columns of an input with ``schema``.

    ``templates``: the texts of prompt templates; any column whose name stands in one is read. ``explicit``: the config
    fields that the user gave; a column named in one of them must be there.

    Raises ``InputError`` naming ``where`` and the column.
    """
    for field in ("prompt_column", "messages_column", "lora_column", "id_column"):
        name = getattr(config, field)
        if field in explicit and name not in schema.names and not (field == "prompt_column" and config.prompt_template):
            flag = field.replace("_", "-")
            raise InputError(f"{where} has no column {name!r}, only {', '.join(schema.names)}: correct --{flag}")
    has_prompt, has_messages = config.prompt_column in schema.names, config.messages_column in schema.names
    templated = _templated(schema.names, templates)
    if has_prompt and has_messages and not config.prompt_template:
        chosen = explicit & {"prompt_column", "messages_column"}
        if len(chosen) != 1:
            both = f"{where} has both {config.prompt_column!r} and {config.messages_column!r}"
            if chosen:
                raise InputError(f"{both}: give only one of --prompt-column and --messages-column")
            raise InputError(f"{both}: say which to use with --prompt-column or --messages-column")
        has_prompt, has_messages = "prompt_column" in chosen, "messages_column" in chosen
    is_messages = has_messages and not has_prompt and not config.prompt_template
    if is_messages:
        templated = []  # messages do not pass through prompt templates
    if not (has_prompt or has_messages or templated):
        raise InputError(
            f"{where} has no column {config.prompt_column!r} or {config.messages_column!r}, only "
            f"{', '.join(schema.names)}: name yours with --prompt-column or --messages-column"
        )
    names: list[str] = []
    if is_messages:
        names.append(config.messages_column)
    elif has_prompt:
        names.append(config.prompt_column)
    names += [name for name in (config.lora_column, *OPTIONS) if name in schema.names]
    names += [name for name in templated if name not in names]
    fields = [pa.field(name, _work_type(schema.field(name), name, config, where)) for name in dict.fromkeys(names)]
    return WorkColumns(is_messages, tuple(field.name for field in fields), work_schema(fields))


def work_schema(fields: Iterable[pa.Field]) -> pa.Schema:
    return pa.schema([*fields, pa.field(ERROR_COLUMN, pa.string())])


def _templated(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    words = {word for text in templates for word in re.findall(r"\w+", text)}
    return [
        name for name in names if name in words or any(name in text for text in templates if not name.isidentifier())
    ]


def _work_type(field: pa.Field, name: str, config: JobConfig, where: str) -> pa.DataType:
    kind = _storage(field.type)
    checks: dict[str, tuple[Callable[[pa.DataType], bool], str, pa.DataType]] = {
        **{option: (pt.is_integer, "an integer", pa.int64()) for option in INTEGERS},
        **{option: (_is_number, "a number", pa.float64()) for option in FLOATS},
        "stop": (_is_stop, "a string or a list of strings", pa.list_(pa.string())),
        config.lora_column: (_is_text, "a string", pa.string()),
        config.messages_column: (_is_messages, "a list of {role, content}", field.type),
        config.prompt_column: (_is_text_or_binary, "a string", pa.large_string()),
    }
    if name not in checks:
        return pa.large_string() if _is_text_or_binary(kind) else kind
    good, want, common = checks[name]
    if not (good(kind) or (pt.is_null(kind) and name not in (config.prompt_column, config.messages_column))):
        raise InputError(f"{where}: column {name!r} must be {want}, not {field.type}")
    return pa.uint64() if pt.is_uint64(kind) and name == "seed" else common


def _storage(kind: pa.DataType) -> pa.DataType:
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pt.is_dictionary(kind) else kind


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_text_or_binary(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind))


def _is_any_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _is_stop(kind: pa.DataType) -> bool:
    return _is_text(kind) or (
        _is_any_list(kind) and (_is_text(_storage(kind.value_type)) or pt.is_null(kind.value_type))
    )


def _is_messages(kind: pa.DataType) -> bool:
    if not (_is_any_list(kind) and pt.is_struct(kind.value_type)):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return all(name in fields and _is_text(_storage(fields[name])) for name in ("role", "content"))


def to_work(batch: pa.RecordBatch, work: WorkColumns) -> pa.RecordBatch:
    """``batch`` (at least the work columns, in the file's types) in the common form. A row's content never raises."""
    errors = np.full(batch.num_rows, None, dtype=object)
    columns = []
    for name in work.names:
        array, bad = _without_bad_text(batch.column(name))
        errors[bad & (errors == None)] = f"invalid_utf8: column {name!r} is not valid UTF-8."  # noqa: E711
        columns.append(_to_common(array, work.schema.field(name).type))
    return pa.RecordBatch.from_arrays([*columns, pa.array(errors, pa.string())], schema=work.schema)


def _to_common(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pt.is_list(kind) and _is_text(array.type):  # one stop string
        values = array.cast(pa.string())
        offsets = np.concatenate([[0], np.cumsum(values.is_valid().to_numpy(zero_copy_only=False))])
        return pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), values.drop_null(), type=kind, mask=values.is_null()
        )
    return array.cast(kind)


def _without_bad_text(array: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """``array`` without extension and dictionary, rows that hold invalid UTF-8 made null; bool: which those were."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if _is_text_or_binary(kind):
        raw = array.cast(pa.large_binary())
        try:
            return raw.cast(pa.large_string()), np.zeros(len(array), dtype=np.bool_)
        except pa.ArrowInvalid:
            bad = _undecodable(raw, lambda value: value if value is None else str(value, "utf-8"))
            return _nulled(raw, bad).cast(pa.large_string()), bad
    try:
        array.validate(full=True)
        return array, np.zeros(len(array), dtype=np.bool_)
    except pa.ArrowInvalid:
        bad = _undecodable(array, None)
        return _nulled(array, bad), bad


def _undecodable(array: pa.Array, decode: Callable[[bytes | None], object] | None) -> NDArray[np.bool_]:
    bad = np.zeros(len(array), dtype=np.bool_)
    for row, scalar in enumerate(array):
        try:
            value = scalar.as_py()
            if decode is not None:
                decode(value)
        except UnicodeDecodeError:
            bad[row] = True
    return bad


def _nulled(array: pa.Array, bad: NDArray[np.bool_]) -> pa.Array:
    return array.take(pa.array(np.arange(len(array)), pa.int64(), mask=bad))
