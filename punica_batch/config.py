"""``JobConfig``: everything that a job is told, in one frozen object.

Where the values come from (flag, environment, job file, default) is ``config_sources``; this module only says what
they are and what is allowed. Field names are the flags' names with underscores.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from punica_batch.types import SamplingParams

Positive = Annotated[int, Field(ge=1)]

# What decides the generations and the output's columns: bound into the plan, refused when changed on resume. Model
# and tokenizer are bound by their digests instead, so they may lie elsewhere next time.
BINDING_FIELDS = (
    "dtype", "kv_cache_dtype", "max_model_len",
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "n", "logprobs", "ignore_eos",
    "chat_template", "apply_chat_template", "prompt_template",
    "prompt_column", "lora_column", "id_column", "messages_column", "columns", "output_prefix",
    "overlong", "limit", "rows_per_shard",
)  # fmt: skip


class JobConfig(BaseModel):
    """One job. Immutable; ``model_copy(update=...)`` makes a changed one."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

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
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_tokens: Positive = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
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

    @field_validator("max_errors")
    @classmethod
    def _check_max_errors(cls, value: str) -> str:
        number = value.removesuffix("%")
        limit = 100.0 if value.endswith("%") else float("inf")
        try:
            good = 0 <= float(number) <= limit and (value.endswith("%") or float(number).is_integer())
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
        """How many of ``rows`` may fail before the job stops."""
        if self.max_errors.endswith("%"):
            return int(rows * float(self.max_errors[:-1]) / 100)
        return int(self.max_errors)

    def binding(self) -> dict[str, Any]:
        """The values of ``BINDING_FIELDS``, JSON-ready."""
        return self.model_dump(mode="json", include=set(BINDING_FIELDS))
