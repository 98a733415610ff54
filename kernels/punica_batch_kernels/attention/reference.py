"""Paged attention in plain torch: the CPU path, the tests' oracle and the benchmarks' baseline.

Sequences of similar lengths are padded to one another and go through ``scaled_dot_product_attention`` together, so a
step costs a handful of calls a layer however many sequences it has. What depends only on the step's lengths (which
blocks to gather, masks) is a ``plan``, made once a step and used by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from punica_batch_kernels.attention.types import AttentionMetadata

# A bucket takes sequences while padding stays below this share of its longest one, or below this many keys.
PADDING_SHARE = 0.25
PADDING_KEYS = 32
# Bounds, padding included, on what several sequences of one bucket take together: keys (the gathered copies) and
# query rows x keys (the mask). One sequence alone may exceed them.
BUCKET_KEYS = 1 << 13
BUCKET_AREA = 1 << 23

IntArray = NDArray[np.int64]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores the step's keys and values: row t goes to slot ``slot_mapping[t]`` (block * block_size + offset).

    ``k``, ``v`` [T, kv_heads, head_dim], strided or not; caches [num_blocks, block_size, kv_heads, head_dim],
    contiguous; ``slot_mapping`` int64 [T].
    """
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v.to(v_cache.dtype))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences computed together, padded to ``q_len`` rows and ``kv_len`` keys each.

    ``rows`` int64 [batch * q_len]: the query rows, padding repeats a sequence's last (None: rows ``first_row``
    onwards as they are); ``valid`` int64: which of the padded rows are real, and ``valid_rows`` where they belong.
    ``blocks`` int64 [batch * blocks each]; ``stale`` int64: gathered positions that hold nothing of the sequence.
    ``mask`` bool [batch, 1, q_len or 1, kv_len], True where a key is seen (None with ``causal`` or when all are).
    """

    batch: int
    q_len: int
    kv_len: int
    first_row: int
    rows: Tensor | None
    valid: Tensor | None
    valid_rows: Tensor | None
    blocks: Tensor
    stale: Tensor | None
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    buckets: tuple[Bucket, ...]


def plan_attention(
    meta: AttentionMetadata, block_size: int, *, window: int | None, sequences: IntArray | None = None
) -> AttentionPlan:
    """What ``paged_attention`` needs to know of the step's lengths; the same for every layer with this window.

    ``sequences``: the numbers of those to plan for (None: all).
    """
    q_starts = np.asarray(meta.qo_indptr, dtype=np.int64)
    q_lens = np.diff(q_starts)
    kv_lens = np.asarray(meta.kv_lens, dtype=np.int64)
    tables = meta.block_tables
    wanted = q_lens if sequences is None else np.zeros_like(q_lens)
    if sequences is not None:
        wanted[sequences] = q_lens[sequences]
    groups = _group(wanted, kv_lens, window)
    buckets = [
        _bucket(g, q_starts, q_lens, kv_lens, tables, block_size, window, meta.slot_mapping.device) for g in groups
    ]
    return AttentionPlan(tuple(buckets))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over each sequence's own keys, causal: the keys up to a row's own position.

    ``q`` [T, heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim], this step's keys already written.
    The rows of sequence s are the last ``q_len`` of its ``kv_lens[s]`` positions. With ``window`` w a row at position
    p sees positions p - w + 1 to p, as in Hugging Face's sliding window. Slots that hold nothing of a sequence are
    never read into a result, whatever they contain. Returns [T, heads, head_dim] of q's dtype.
    """
    if plan is None:
        plan = plan_attention(meta, k_cache.shape[1], window=window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run_plan(plan, q, k_cache, v_cache, out, scale)
    return out


def run_plan(plan: AttentionPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scale: float) -> None:
    """``paged_attention`` of the plan's sequences into their rows of ``out``."""
    for bucket in plan.buckets:
        _run(bucket, q, k_cache, v_cache, out, scale)


def _group(q_lens: IntArray, kv_lens: IntArray, window: int | None) -> list[IntArray]:
    """Sequence numbers by bucket, in rising order inside each. Sequences without rows are dropped."""
    seen = kv_lens if window is None else np.minimum(kv_lens, window + q_lens - 1)
    fresh = (q_lens == kv_lens) & (q_lens > 1)
    order = np.lexsort((-q_lens, -seen, fresh, q_lens > 1))
    kinds = list(zip(fresh.tolist(), (q_lens > 1).tolist(), strict=True))
    groups: list[list[int]] = []
    head = most_rows = 0
    for s in order[q_lens[order] > 0].tolist():
        rows = int(q_lens[s])
        if groups and kinds[s] == kinds[head]:
            near = _near(int(seen[s]), int(seen[head])) and _near(rows, int(q_lens[head]))
            keys = (len(groups[-1]) + 1) * int(seen[head])
            if near and keys <= BUCKET_KEYS and keys * max(rows, most_rows) <= BUCKET_AREA:
                groups[-1].append(s)
                most_rows = max(rows, most_rows)
                continue
        groups.append([s])
        head, most_rows = s, rows
    return [np.asarray(sorted(g), dtype=np.int64) for g in groups]


def _near(length: int, longest: int) -> bool:
    return abs(longest - length) <= max(PADDING_KEYS, PADDING_SHARE * longest)


def _bucket(
    members: IntArray,
    q_starts: IntArray,
    q_lens: IntArray,
    kv_lens: IntArray,
    tables: NDArray[np.int32],
    block_size: int,
    window: int | None,
    device: torch.device,
) -> Bucket:
    lens, q_counts, starts = kv_lens[members], q_lens[members], q_starts[members]
    q_len = int(q_counts.max())
    offset = np.zeros_like(lens) if window is None else np.maximum(lens - q_counts - window + 1, 0) // block_size
    num_blocks = -(-lens // block_size) - offset  # blocks that hold visible keys
    width = int(num_blocks.max())
    column = np.minimum(np.arange(width), num_blocks[:, None] - 1)  # padding repeats a block of its own
    blocks = tables[members[:, None], offset[:, None] + column]
    kv_len = int((lens - offset * block_size).max())

    position = offset[:, None] * block_size + np.arange(kv_len)  # [batch, kv_len], of each gathered key
    gathered = np.arange(len(members))[:, None] * (width * block_size) + np.arange(width * block_size)
    every = offset[:, None] * block_size + np.arange(width * block_size)
    stale = gathered[every >= lens[:, None]]

    row = np.arange(q_len)
    query = lens[:, None] - q_counts[:, None] + np.minimum(row, q_counts[:, None] - 1)  # [batch, q_len], its position
    causal = q_len > 1 and bool((lens == q_counts).all()) and (window is None or kv_len <= window)
    mask = None
    if not causal:
        seen = position[:, None, :] <= query[:, :, None]
        if window is not None:
            seen &= position[:, None, :] > query[:, :, None] - window
        mask = None if seen.all() else torch.from_numpy(seen[:, None]).to(device)

    padded = bool((q_counts != q_len).any())
    contiguous = not padded and bool((np.diff(starts) == q_len).all())
    rows = starts[:, None] + np.minimum(row, q_counts[:, None] - 1)
    real = np.flatnonzero(row < q_counts[:, None])
    return Bucket(
        batch=len(members), q_len=q_len, kv_len=kv_len, first_row=int(starts[0]),
        rows=None if contiguous else _index(rows, device),
        valid=_index(real, device) if padded else None,
        valid_rows=None if contiguous else _index(rows.reshape(-1)[real], device),
        blocks=_index(blocks, device), stale=_index(stale, device) if len(stale) else None,
        mask=mask, causal=causal,
    )  # fmt: skip


def _index(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64).reshape(-1)).to(device)


def _run(bucket: Bucket, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scale: float) -> None:
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    last = bucket.first_row + bucket.batch * bucket.q_len
    queries = q[bucket.first_row : last] if bucket.rows is None else q.index_select(0, bucket.rows)
    k = _gather(k_cache, bucket, q.dtype)
    v = _gather(v_cache, bucket, q.dtype)
    if bucket.q_len == 1:  # the query heads of a key head take the place of its rows: nothing is repeated
        grouped = queries.reshape(bucket.batch, kv_heads, heads // kv_heads, head_dim)
        result = scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask, scale=scale)
        result = result.reshape(bucket.batch, heads, head_dim)
    else:
        by_head = queries.view(bucket.batch, bucket.q_len, heads, head_dim).transpose(1, 2)
        result = scaled_dot_product_attention(
            by_head, k, v, attn_mask=bucket.mask, is_causal=bucket.causal, scale=scale, enable_gqa=heads != kv_heads
        )
        result = result.transpose(1, 2).reshape(-1, heads, head_dim)
    if bucket.valid is not None:
        result = result.index_select(0, bucket.valid)
    if bucket.valid_rows is None:
        out[bucket.first_row : last] = result
    else:
        out.index_copy_(0, bucket.valid_rows, result)


def _gather(cache: Tensor, bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """[batch, kv_heads, kv_len, head_dim] of the bucket's keys or values; stale positions zeroed, as 0 * NaN is NaN."""
    kv_heads, head_dim = cache.shape[2:]
    gathered = cache.index_select(0, bucket.blocks).view(-1, kv_heads, head_dim)
    if bucket.stale is not None:
        gathered.index_fill_(0, bucket.stale, 0)
    by_sequence = gathered.view(bucket.batch, -1, kv_heads, head_dim)[:, : bucket.kv_len]
    return by_sequence.transpose(1, 2).to(dtype)
