"""``EngineSettings``: what a worker needs to build its engine. Plain data without torch: the parent makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from punica_batch.errors import UsageError
from punica_batch.types import AdapterSpec, Dtype

if TYPE_CHECKING:
    from punica_batch.config import JobConfig

# The most tokens of a step. A GPU's steps cost less a token the more of them there are: the label load without adapters
# had 4 % more rows a second at 8,192 than at 2,048 (H200, two states of the code); a CPU gains nothing and would wait
# longer for the first token. 8,448 are 66 tiles of 128 rows, half as many as an H200 has multiprocessors, so that a
# product with an even number of tiles of columns leaves none idle at its end: 0.7 % more rows a second than 8,192, and
# as many as at 16,896.
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8448}
# The largest rank that an engine prepares for where its adapters were not looked at before.
DEFAULT_MAX_LORA_RANK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One engine on one device. Everything is decided: no "auto" is left.

    ``model``: the folder of the base model; ``tokenizer``: that of the tokenizer (None: the model's). ``device`` is
    torch's name of it. ``num_blocks`` KV blocks of ``block_size`` tokens; ``max_loras`` adapter slots, for ranks up to
    ``max_lora_rank`` (the rows of an adapter beyond it fail), which together may hold ``max_lora_bytes`` of weights
    (None: whatever they come to), as ranks differ; ``gpu_memory_utilization``: the share of a GPU beyond which nothing
    is allocated, so that there may come to be fewer blocks; ``max_num_batched_tokens`` bounds a step's rows.
    ``adapters`` are all that requests may name, by ``lora_id``; ``storage_options`` open their files and are never
    shown. ``trust_stamps``: an adapter file of the size, times and inode that it had when it was digested last is not
    digested again. ``age_bound``: how many newer sequences may go ahead of one that waits for its adapter.
    ``read_ahead``: adapters that may be loading, or loaded and in no slot yet, before the scheduler asks for them (on a
    GPU at least as many as threads load).

    Raises ``UsageError`` naming the field when a value is out of range.
    """

    model: str
    tokenizer: str | None = None
    dtype: Dtype = "float32"
    kv_cache_dtype: Dtype = "float32"
    device: str = "cpu"
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int
    max_loras: int = 8
    max_lora_rank: int = DEFAULT_MAX_LORA_RANK
    max_lora_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict)
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    seed: int = 0
    age_bound: int = 256
    read_ahead: int = 4
    trust_stamps: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_loras", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running row computes a token in each step"
            )


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Of weights and activations, and of the KV cache."""

    model: Dtype
    kv_cache: Dtype


def resolve_dtypes(config: JobConfig, stored: Dtype, device: str) -> Dtypes:
    """``auto``: the checkpoint's own (``stored``) on a GPU, float32 on a CPU, where half precision is slower; the
    cache as the model."""
    own: Dtype = stored if device != "cpu" else "float32"
    dtype = own if config.dtype == "auto" else config.dtype
    return Dtypes(dtype, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
