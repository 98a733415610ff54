"""``JobConfig``: everything that a job is told, in one frozen object.

Where the values come from (flag, environment, job file, default) is ``config_sources``; this module only says what
they are and what is allowed. Field names are the flags' names with underscores.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic import ValidationError as PydanticError

from punica_batch.errors import UsageError
from punica_batch.types import SamplingParams

MAX_INTEGER = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]

# What decides the generations and the output's columns: bound into the plan, refused when changed on resume. Model
# and tokenizer are bound by their digests instead, so they may lie elsewhere next time.
BINDING_FIELDS = (
    "dtype", "kv_cache_dtype", "max_model_len",
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "n", "logprobs", "ignore_eos",
    "chat_template", "apply_chat_template", "prompt_template",
    "prompt_column", "lora_column", "id_column", "messages_column", "columns", "output_prefix",
    "overlong", "limit", "rows_per_shard",
)  # fmt: skip


_NUMBERS_AS_TEXT = ("gpus", "max_errors")
_KINDS = {"int": "a valid integer", "float": "a valid number", "bool": "true or false"}
_LISTS = ("inputs", "stop")


class FieldError(UsageError):
    """A value of ``JobConfig`` is wrong: ``field`` and the rest of the sentence about it, ``problem``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"JobConfig: {field!r} {problem}")
        self.field = field
        self.problem = problem

    @classmethod
    def of(cls, error: PydanticError) -> FieldError:
        """The first fault in ``error``, on one line."""
        return cls(*_problem(error))


class JobFields(BaseModel):
    """The fields of ``JobConfig`` and what is allowed in them, as pydantic reports it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True, allow_inf_nan=False
    )

    inputs: tuple[str, ...] = ()
    output: str | None = None

    model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    adapters: str | None = None
    lora_modules: dict[str, str] = Field(default_factory=dict)

    max_loras: Positive | None = None
    max_lora_rank: Positive | None = None
    max_model_len: Positive | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    block_size: Positive = 16
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_tokens: Positive = 256
    stop: tuple[str, ...] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=256)] | None = None
    ignore_eos: bool = False

    chat_template: str | None = None
    apply_chat_template: bool | None = None
    prompt_template: str | None = None

    prompt_column: str = "prompt"
    lora_column: str = "lora_id"
    id_column: str = "id"
    messages_column: str = "messages"
    columns: tuple[str, ...] | None = None
    output_prefix: str = ""

    limit: Positive | None = None
    on_error: Literal["record", "raise"] = "record"
    max_errors: str = "5%"
    overlong: Literal["error", "truncate-left"] = "error"
    rows_per_shard: Positive = 10_000
    shard: str | None = None
    overwrite: bool = False
    pack: Literal["busiest", "spread"] = "busiest"
    storage_options: dict[str, str] = Field(default_factory=dict, repr=False)
    grace: Annotated[float, Field(ge=0)] = 20.0
    max_runtime: Annotated[float, Field(gt=0)] | None = None
    work_dir: str | None = None

    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: Positive | None = None
    gpus: str | None = None

    @field_validator("output", "model", "revision", "tokenizer", "adapters", "work_dir")
    @classmethod
    def _check_not_empty(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("is empty")
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("must be a list of non-empty strings")
        return value

    @field_validator("max_errors")
    @classmethod
    def _check_max_errors(cls, value: str) -> str:
        number = value.removesuffix("%")
        limit = 100.0 if value.endswith("%") else float("inf")
        try:
            good = 0 <= float(number) <= limit and (value.endswith("%") or int(number) >= 0)
        except ValueError:
            good = False
        if not good:
            raise ValueError("must be a number of rows (20) or a share of them (5%)")
        return value

    @field_validator("shard")
    @classmethod
    def _check_shard(cls, value: str | None) -> str | None:
        if value is None:
            return None
        index, _, count = value.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise ValueError("must be I/N with 1 <= I <= N, for example 2/8")
        return value

    @property
    def shard_of(self) -> tuple[int, int]:
        """(zero-based index, count); (0, 1) without ``--shard``."""
        if self.shard is None:
            return 0, 1
        index, _, count = self.shard.partition("/")
        return int(index) - 1, int(count)

    def sampling(self) -> SamplingParams:
        """The job's defaults for rows that say nothing themselves; ``seed`` stays the job's, not a row's."""
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            min_p=self.min_p, stop=self.stop, n=self.n or 1, logprobs=self.logprobs, ignore_eos=self.ignore_eos,
        )  # fmt: skip

    def error_limit(self, rows: int) -> int:
        """How many of ``rows`` may fail before the job stops. A share is at least one row unless it is 0 %: a trial of
        a few rows must not end at its first bad one."""
        if not self.max_errors.endswith("%"):
            return int(self.max_errors)
        share = float(self.max_errors[:-1]) / 100
        return max(1, int(rows * share)) if share else 0

    def binding(self) -> dict[str, Any]:
        """The values of ``BINDING_FIELDS``, JSON-ready."""
        return self.model_dump(mode="json", include=set(BINDING_FIELDS))


class JobConfig(JobFields):
    """One job. Immutable; ``model_copy(update=...)`` makes a changed one. Raises ``FieldError``, a ``UsageError``."""

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**{name: _natural(name, value) for name, value in values.items()})
            except PydanticError as error:
                raise FieldError.of(error) from None


def _natural(field: str, value: Any) -> Any:
    """What Python's way to write a value stands for: one string for a list of one, a number for a number in text, a
    path object for its name."""
    if field in _NUMBERS_AS_TEXT and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if field in _LISTS and isinstance(value, str | os.PathLike):
        value = (value,)
    if isinstance(value, list | tuple):
        return tuple(map(_path_name, value))
    if isinstance(value, dict):
        return {key: _path_name(item) for key, item in value.items()}
    return _path_name(value)


def _path_name(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def nearest(key: str, valid: Iterable[str] = JobFields.model_fields) -> str:
    """The valid name that looks most like ``key``."""
    return difflib.get_close_matches(key, list(valid), n=1, cutoff=0.0)[0]


def _problem(error: PydanticError) -> tuple[str, str]:
    """(field, "must be …") of the first error. Shows numbers that are out of range, never text: it may be secret."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return location[0], f"is unknown; the nearest valid one is {nearest(location[0])!r}"
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").replace("tuple", "list")
    if first["type"].endswith(("_parsing", "_parsing_size", "_from_float")):
        message = f"must be {_KINDS[first['type'].partition('_')[0]]}"
    value: object = first["input"]
    if first["type"] == "literal_error" and isinstance(value, str):
        expected = [part.strip("'") for part in first["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return location[0], f"{message}; the nearest valid one is {nearest(value, expected)!r}"
    inside = f" ({'.'.join(location[1:])})" if len(location) > 1 else ""
    if first["type"] == "value_error":
        return location[0], message + inside
    if isinstance(value, int | float) and location[0] != "storage_options":
        return location[0], f"{message}{inside}, not {value!r}"
    if value is None:
        return location[0], f"{message}{inside}, not None"
    kind = {"str": "string", "tuple": "list", "dict": "table"}.get(type(value).__name__, type(value).__name__)
    return location[0], f"{message}{inside}, not {'an' if kind[0] in 'aeiou' else 'a'} {kind}"
