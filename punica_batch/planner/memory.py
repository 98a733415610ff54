"""How one worker's memory is divided: weights, adapter slots, KV blocks; and what batch that pays for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from punica_batch.errors import ValidationError

MAX_BATCH = 256  # beyond it a step's time grows with the batch, so a larger one no longer pays
ADAPTER_SHARE = 4  # slots nobody asked for take at most a quarter of what the weights leave


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One worker's memory. Sizes in bytes.

    - ``total_bytes``: what the worker may use; ``weight_bytes`` and ``workspace_bytes`` (activations) of it are given;
    - ``num_blocks`` KV blocks take ``kv_bytes``; ``max_loras`` adapter slots take ``adapter_bytes``;
    - ``max_num_seqs``: the batch cap;
    - ``adapters_fit``: the most slots that would fit beside the KV blocks of one full-length row;
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
    slot_bytes: int = 0,
    num_adapters: int = 0,
    row_tokens: Sequence[int] = (),
    num_sequences: int | None = None,
    max_num_seqs: int | None = None,
    max_loras: int | None = None,
) -> MemoryPlan:
    """Divides ``total_bytes`` (a GPU's share; on the CPU the worker's fraction of the available RAM).

    ``slot_bytes``: one adapter slot, as large as the job's largest adapter. ``num_adapters``: distinct ones in the
    job. ``row_tokens``: positions that (a sample of) the rows are expected to come to, prompt and output; none known
    means ``max_model_len`` each. Too low costs preemptions, too high a smaller batch, neither a failure.
    ``num_sequences``: rows times samples of the whole job, when known. ``max_num_seqs`` and ``max_loras``: the user's
    own, kept as they are.

    Raises ``ValidationError`` when the weights do not fit, when a row of ``max_model_len`` tokens does not fit beside
    them, or when ``max_loras`` slots do not fit beside both.
    """
    if num_adapters == 0 and max_loras is None:
        slot_bytes = 0  # the one slot stays empty
    left = total_bytes - weight_bytes - workspace_bytes
    if left <= 0:
        raise ValidationError(
            f"the model needs {_size(weight_bytes + workspace_bytes)} (weights and workspace) and the worker may use "
            f"{_size(total_bytes)}: use fewer workers, a smaller dtype, or more memory"
        )
    row_blocks = -(-max_model_len // block_size)
    slots_wanted = max_loras if max_loras is not None else min(num_adapters, 1)
    spare = left - row_blocks * kv_bytes_per_block
    if spare < 0 or (max_loras is None and spare < slots_wanted * slot_bytes):
        raise ValidationError(
            f"one row of max_model_len {max_model_len} needs {_size(left - spare)} of KV cache and an adapter "
            f"{_size(slots_wanted * slot_bytes)}; the weights leave {_size(left)}: lower --max-model-len, use fewer "
            "workers, or more memory"
        )
    adapters_fit = spare // slot_bytes if slot_bytes else max(num_adapters, max_loras or 1)
    if max_loras is not None and max_loras * slot_bytes > spare:
        raise ValidationError(
            f"--max-loras {max_loras} needs {_size(max_loras * slot_bytes)}, and {_size(spare)} are left beside the "
            f"weights and one full-length row: at most {adapters_fit} fit"
        )
    slots, slots_reason = _adapter_slots(left, spare, slot_bytes, num_adapters, adapters_fit, max_loras)
    blocks_that_fit = (left - slots * slot_bytes) // kv_bytes_per_block
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
        max_loras=slots,
        adapter_bytes=slots * slot_bytes,
        adapters_fit=adapters_fit,
        max_num_seqs=seqs,
        reasons=(
            f"{_size(weight_bytes)} for the base model and {_size(workspace_bytes)} to compute in, "
            f"of {_size(total_bytes)} that a worker may use",
            slots_reason,
            seqs_reason,
            f"{_size(num_blocks * kv_bytes_per_block)} for the KV cache, {num_blocks:,} blocks of {block_size} tokens: "
            + _kv_reason(seqs, max_model_len, is_all=num_blocks == blocks_that_fit),
        ),
    )


def _adapter_slots(
    left: int, spare: int, slot_bytes: int, num_adapters: int, adapters_fit: int, asked: int | None
) -> tuple[int, str]:
    """Slots and why. The scheduler wants at least one even where no row names an adapter."""

    def what(slots: int) -> str:
        loaded = "1 adapter" if slots == 1 else f"{slots:,} adapters"
        return f"{_size(slots * slot_bytes)} for {loaded} at a time, {_size(slot_bytes)} each"

    if asked is not None:
        return asked, f"{what(asked)}: --max-loras says so ({adapters_fit:,} would fit)"
    if num_adapters == 0:
        return 1, "no adapters"
    share = min(left // ADAPTER_SHARE, spare) // slot_bytes if slot_bytes else num_adapters
    # two at least where they fit, so that the next adapter loads while one runs
    slots = min(num_adapters, MAX_BATCH, max(share, min(2, adapters_fit)))
    if slots == num_adapters:
        return slots, f"{what(slots)}: all adapters of the job stay loaded ({adapters_fit:,} would fit)"
    why = "no more run in one batch" if slots == MAX_BATCH else "a quarter of what the base model leaves"
    rest = f"the job has {num_adapters:,}, which take turns; --max-loras changes it ({adapters_fit:,} would fit)"
    return slots, f"{what(slots)}: {why}; {rest}"


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
