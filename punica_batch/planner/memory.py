"""How one worker's memory is divided: weights, adapter slots, KV blocks; and what batch that pays for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from punica_batch.errors import ValidationError

MAX_BATCH = 256  # beyond it a step's time grows with the batch, so a larger one no longer pays
MAX_ADAPTERS = MAX_BATCH + 64  # those of a batch, and the next ones, which load beside it
ADAPTER_SHARE = 4  # adapters that nobody asked to keep take at most a quarter of what the weights leave


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One worker's memory. Sizes in bytes.

    - ``total_bytes``: what the worker may use; ``weight_bytes`` and ``workspace_bytes`` (activations) of it are given;
    - ``num_blocks`` KV blocks take ``kv_bytes``;
    - adapters that are loaded at a time are at most ``max_loras`` and take at most ``adapter_bytes``, whichever of the
      two is reached first, as their ranks differ;
    - ``max_num_seqs``: the batch cap;
    - ``adapters_fit``: how many of average size would fit beside the KV blocks of one full-length row;
    - ``reasons``: one sentence for each number, for ``plan``.
    """

    total_bytes: int
    weight_bytes: int
    workspace_bytes: int
    num_blocks: int
    kv_bytes: int
    max_loras: int
    adapter_bytes: int
    adapters_fit: int
    max_num_seqs: int
    reasons: tuple[str, ...]


def memory_plan(
    *,
    total_bytes: int,
    weight_bytes: int,
    kv_bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    workspace_bytes: int = 0,
    adapter_sizes: Sequence[int] = (),
    row_tokens: Sequence[int] = (),
    num_sequences: int | None = None,
    max_num_seqs: int | None = None,
    max_loras: int | None = None,
) -> MemoryPlan:
    """Divides ``total_bytes`` (a GPU's share; on the CPU the worker's fraction of the available RAM).

    ``adapter_sizes``: bytes of each distinct adapter of the job. ``row_tokens``: positions that (a sample of) the rows
    are expected to come to, prompt and output; none known means ``max_model_len`` each. Too low costs preemptions, too
    high a smaller batch, neither a failure. ``num_sequences``: rows times samples of the whole job, when known.
    ``max_num_seqs`` and ``max_loras``: the user's own, kept as they are.

    Raises ``ValidationError`` when the weights do not fit, when a row of ``max_model_len`` tokens and the largest
    adapter do not fit beside them, or when ``max_loras`` adapters of average size do not.
    """
    left = total_bytes - weight_bytes - workspace_bytes
    if left <= 0:
        raise ValidationError(
            f"the model needs {_size(weight_bytes + workspace_bytes)} (weights and workspace) and the worker may use "
            f"{_size(total_bytes)}: use fewer workers, a smaller dtype, or more memory"
        )
    row_blocks = -(-max_model_len // block_size)
    spare = left - row_blocks * kv_bytes_per_block
    largest = max(adapter_sizes, default=0)
    if spare < largest:
        raise ValidationError(
            f"one row of max_model_len {max_model_len} needs {_size(left - spare)} of KV cache and the largest adapter "
            f"{_size(largest)}; the weights leave {_size(left)}: lower --max-model-len, use fewer workers, or more "
            "memory"
        )
    adapters = _adapter_share(left, spare, adapter_sizes, max_loras)
    blocks_that_fit = (left - adapters.nbytes) // kv_bytes_per_block
    lengths = [min(tokens, max_model_len) for tokens in row_tokens] or [max_model_len]
    typical = -(-sum(-(-length // block_size) for length in lengths) // len(lengths))
    seqs, seqs_reason = _batch_cap(blocks_that_fit // typical, max_num_batched_tokens, num_sequences, max_num_seqs)
    num_blocks = min(blocks_that_fit, seqs * row_blocks)
    return MemoryPlan(
        total_bytes=total_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * kv_bytes_per_block,
        max_loras=adapters.slots,
        adapter_bytes=adapters.nbytes,
        adapters_fit=adapters.fit,
        max_num_seqs=seqs,
        reasons=(
            f"{_size(weight_bytes)} for the base model and {_size(workspace_bytes)} to compute in, "
            f"of {_size(total_bytes)} that a worker may use",
            adapters.reason,
            seqs_reason,
            f"{_size(num_blocks * kv_bytes_per_block)} for the KV cache, {num_blocks:,} blocks of {block_size} tokens: "
            + _kv_reason(seqs, max_model_len, is_all=num_blocks == blocks_that_fit),
        ),
    )


@dataclass(frozen=True, slots=True)
class _AdapterShare:
    slots: int
    nbytes: int
    fit: int
    reason: str


def _adapter_share(left: int, spare: int, sizes: Sequence[int], asked: int | None) -> _AdapterShare:
    """The adapters' part of ``left``, of which ``spare`` is not the one full-length row's. The scheduler wants at least
    one slot even where no row names an adapter."""
    count, total, largest = len(sizes), sum(sizes), max(sizes, default=0)
    average = -(-total // max(count, 1))
    fit = spare // average if average else max(count, asked or 1)
    would_fit = f"({fit:,} would fit)"
    if asked is not None:
        nbytes = max(asked * average, largest)
        if nbytes > spare:
            raise ValidationError(
                f"--max-loras {asked} needs {_size(nbytes)}, and {_size(spare)} are left beside the weights and one "
                f"full-length row: at most {fit} fit"
            )
        return _AdapterShare(asked, nbytes, fit, f"{_loaded(nbytes, asked, sizes)}: --max-loras says so {would_fit}")
    if count == 0:
        return _AdapterShare(1, 0, fit, "no adapters")
    # two at least where they fit, so that the next adapter loads while one runs
    share = min(spare, max(left // ADAPTER_SHARE, 2 * largest))
    if total <= share and count <= MAX_ADAPTERS:
        reason = f"{_loaded(total, count, sizes)}: all adapters of the job stay loaded {would_fit}"
        return _AdapterShare(count, total, fit, reason)
    nbytes = min(share, sum(sorted(sizes)[-MAX_ADAPTERS:]))
    slots = min(MAX_ADAPTERS, _smallest_within(nbytes, sizes))
    why = "no more run or load at a time" if nbytes < share else "a quarter of what the base model leaves"
    rest = f"the job has {count:,}, which take turns; --max-loras changes it {would_fit}"
    typical = min(slots, nbytes // average) if average else slots
    return _AdapterShare(slots, nbytes, fit, f"{_loaded(nbytes, typical, sizes)}: {why}; {rest}")


def _smallest_within(nbytes: int, sizes: Sequence[int]) -> int:
    """How many of the smallest ``sizes`` come to at most ``nbytes``."""
    return sum(together <= nbytes for together in accumulate(sorted(sizes)))


def _loaded(nbytes: int, count: int, sizes: Sequence[int]) -> str:
    least, most = min(sizes, default=0), max(sizes, default=0)
    about = "" if least == most or nbytes == sum(sizes) else "about "
    each = _size(most) if least == most else f"{_size(least)} to {_size(most)}"
    return f"{_size(nbytes)} for {about}{count:,} adapter{'' if count == 1 else 's'} at a time, {each} each"


def _batch_cap(rows_that_fit: int, max_tokens: int, num_sequences: int | None, asked: int | None) -> tuple[int, str]:
    if asked is not None and asked <= max_tokens:
        return asked, f"{_at_a_time(asked)}: --max-num-seqs says so"
    limits = [
        (MAX_BATCH, "more would not be faster") if asked is None else (asked, "--max-num-seqs says so"),
        (max_tokens, "--max-num-batched-tokens has to hold a token of each"),
    ]
    if asked is None:
        limits.append((rows_that_fit, "the KV cache has room for so many of average length"))
        if num_sequences is not None:
            limits.append((num_sequences, "the job has no more"))
    cap, why = min(limits)
    return max(cap, 1), f"{_at_a_time(max(cap, 1))}: {why}"


def _at_a_time(seqs: int) -> str:
    return f"{'1 answer' if seqs == 1 else f'{seqs:,} answers'} generated at a time"


def _kv_reason(seqs: int, max_model_len: int, *, is_all: bool) -> str:
    if is_all:
        return "all memory that is left"
    return f"enough for {'it' if seqs == 1 else 'all of them'} at the full length of {max_model_len:,} tokens"


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
