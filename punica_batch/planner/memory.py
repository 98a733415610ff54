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
    adapters_fit = spare // slot_bytes if slot_bytes else max(num_adapters, 1)
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
            f"weights {_size(weight_bytes)} and workspace {_size(workspace_bytes)} of {_size(total_bytes)}",
            slots_reason,
            seqs_reason,
            f"{num_blocks} KV blocks of {block_size} tokens ({_size(num_blocks * kv_bytes_per_block)}): "
            + ("all that is left" if num_blocks == blocks_that_fit else f"{seqs} rows of full length need no more"),
        ),
    )


def _adapter_slots(
    left: int, spare: int, slot_bytes: int, num_adapters: int, adapters_fit: int, asked: int | None
) -> tuple[int, str]:
    """Slots and why. The scheduler wants at least one even where no row names an adapter."""
    if asked is not None:
        return asked, f"{asked} adapter slots of {_size(slot_bytes)}: --max-loras (at most {adapters_fit} fit)"
    if num_adapters == 0:
        return 1, "no adapters"
    share = min(left // ADAPTER_SHARE, spare) // slot_bytes if slot_bytes else num_adapters
    # two at least where they fit, so that the next adapter loads while one runs
    slots = min(num_adapters, MAX_BATCH, max(share, min(2, adapters_fit)))
    what = f"{slots} adapter slots of {_size(slot_bytes)} for the job's {num_adapters}"
    if slots == num_adapters:
        return slots, f"{what}: all stay loaded (at most {adapters_fit} fit)"
    why = "a batch has no more rows" if slots == MAX_BATCH else "a quarter of what the weights leave"
    return slots, f"{what}: {why} (at most {adapters_fit} fit); the others load on demand"


def _batch_cap(rows_that_fit: int, max_tokens: int, num_sequences: int | None, asked: int | None) -> tuple[int, str]:
    if asked is not None and asked <= max_tokens:
        return asked, f"batch cap {asked}: --max-num-seqs"
    limits = [
        (MAX_BATCH if asked is None else asked, "a larger batch no longer pays" if asked is None else "--max-num-seqs"),
        (max_tokens, "--max-num-batched-tokens must hold one token of each row"),
    ]
    if asked is None:
        limits.append((rows_that_fit, "KV blocks for as many rows of the usual length"))
        if num_sequences is not None:
            limits.append((num_sequences, "the job has no more rows"))
    cap, why = min(limits)
    return max(cap, 1), f"batch cap {max(cap, 1)}: {why}"


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
