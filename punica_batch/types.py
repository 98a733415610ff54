"""What travels along the data's way: ``Request`` → (worker) → ``RowResult`` with its ``Completion``s.

Everything here is plain, immutable data, safe to send to another process or machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from punica_batch.errors import RowError, UsageError


class FinishReason(StrEnum):
    STOP = "stop"  # an EOS id or a stop string
    LENGTH = "length"  # max_tokens or the model's context reached
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row's tokens are chosen. Names and meanings are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 keeps the whole vocabulary. ``seed`` is the row's own;
    ``None`` means that the row's number seeds it (see ``engine.sampler``). ``logprobs`` K adds the chosen
    token's log-probability and those of the K likeliest (0: the chosen one only).

    Raises ``UsageError`` naming the field when a value is out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number of at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= -1, "-1 or 0 (all) or positive"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            ("stop", all(self.stop), "a list of non-empty strings"),
            ("n", 1 <= self.n <= 1024, "from 1 to 1024"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 256, "from 0 to 256"),
        )
        for name, good, want in checks:
            if not good:
                raise UsageError(f"{name} must be {want}, not {getattr(self, name)!r}")

    def __reduce__(self) -> tuple[Callable[..., SamplingParams], tuple[Any, ...]]:
        return _restore_sampling, (
            self.max_tokens, self.temperature, self.top_p, self.top_k, self.min_p, self.seed, self.stop, self.n,
            self.logprobs, self.ignore_eos,
        )  # fmt: skip


# What crosses processes with every row has a ``__reduce__`` of its own: a frozen dataclass with slots is else pickled
# and unpickled in Python field by field, which costs more than all else that is done for a short row.
@lru_cache(maxsize=1024)
def _restore_sampling(*values: Any) -> SamplingParams:
    """Rows of one job mostly say the same: they share the object."""
    return SamplingParams(*values)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One input row, tokenized. ``sampling.n`` samples are generated from the one prompt.

    ``row`` is the row's number in the whole input (what the journal and the random streams are keyed by),
    ``prompt_token_ids`` int32 [prompt length], BOS included. ``lora_id`` None is the base model.
    """

    row: int
    prompt_token_ids: NDArray[np.int32]
    lora_id: str | None
    sampling: SamplingParams

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def __reduce__(self) -> tuple[Callable[..., Request], tuple[Any, ...]]:
        return _restore_request, (self.row, self.prompt_token_ids.tobytes(), self.lora_id, self.sampling)


def _restore_request(row: int, prompt: bytes, lora_id: str | None, sampling: SamplingParams) -> Request:
    lora_id = sys.intern(lora_id) if lora_id is not None else None
    return Request(row, np.frombuffer(prompt, np.int32), lora_id, sampling)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one sample: ``chosen[i]`` of token i; ``top[i]`` the K likeliest (id, logprob)."""

    chosen: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of a row. ``token_ids`` are those that count (EOS excluded from the text, included here)."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: TokenLogprobs | None = None

    def __reduce__(self) -> tuple[type[Completion], tuple[Any, ...]]:
        return Completion, (self.token_ids, self.text, self.finish_reason, self.logprobs)


@dataclass(frozen=True, slots=True)
class RowResult:
    """All that the output columns of one row need. Exactly one of ``completions`` and ``error`` is set.

    ``adapter_sha256`` is the digest of the adapter that answered (None: base model, or not known).
    """

    row: int
    prompt_tokens: int | None
    completions: tuple[Completion, ...] = ()
    error: str | None = None
    adapter_sha256: str | None = None

    @classmethod
    def failed(cls, row: int, error: RowError, prompt_tokens: int | None = None) -> RowResult:
        return cls(row=row, prompt_tokens=prompt_tokens, error=str(error))

    def __reduce__(self) -> tuple[type[RowResult], tuple[Any, ...]]:
        return RowResult, (self.row, self.prompt_tokens, self.completions, self.error, self.adapter_sha256)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One registry entry: where an adapter's files are and the text settings shared by its rows.

    ``None`` fields fall back to the job's. ``path`` is a folder or fsspec URL.
    """

    name: str
    path: str
    labels: tuple[str, ...] | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    label_template: str | None = None
    chat_template: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker's state at a moment, for the planner's view and the live screen."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    adapters_resident: int
    prompt_tokens: int  # computed since start, recomputation included
    generated_tokens: int  # sampled since start
    preemptions: int
    steps: int


JsonDict = dict[str, Any]
Dtype = Literal["float32", "float16", "bfloat16"]  # by torch's names
