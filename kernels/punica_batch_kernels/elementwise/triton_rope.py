"""Norms of heads, rotation and the KV cache's writes in one launch, which FlashInfer has for FP8 alone."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from punica_batch_kernels.elementwise.types import QKNorm, Rotation

# Numbers of one half of the heads that a program holds.
_PROGRAM = 1024


@triton.jit
def rope_and_write_kv_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    eps,
    qkv_stride,
    k_stride_block,
    k_stride_slot,
    v_stride_block,
    v_stride_slot,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One row's ``BLOCK_HEADS`` heads, in float32 until each is stored."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, BLOCK_HALF)[None, :]
    real = (head < NUM_HEADS + 2 * KV_HEADS) & (d < HALF)
    is_q, is_v = head < NUM_HEADS, head >= NUM_HEADS + KV_HEADS
    x_ptr = qkv_ptr + row * qkv_stride + head * (2 * HALF) + d
    first_raw = tl.load(x_ptr, mask=real, other=0.0)
    second_raw = tl.load(x_ptr + HALF, mask=real, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if NORM:
        mean = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        scale = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        in_half = d < HALF
        q_first = tl.load(q_norm_ptr + d, mask=in_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm_ptr + d, mask=in_half, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm_ptr + HALF + d, mask=in_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm_ptr + HALF + d, mask=in_half, other=0.0).to(tl.float32)
        first = first * scale * tl.where(is_q, q_first, k_first)
        second = second * scale * tl.where(is_q, q_second, k_second)
    cos = tl.load(cos_ptr + row * HALF + d, mask=d < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + d, mask=d < HALF, other=0.0)
    turned_first = (first * cos - second * sin).to(first_raw.dtype)
    turned_second = (second * cos + first * sin).to(first_raw.dtype)
    tl.store(x_ptr, turned_first, mask=real & is_q)
    tl.store(x_ptr + HALF, turned_second, mask=real & is_q)
    slot = tl.load(slots_ptr + row)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_ptr = k_cache_ptr + block * k_stride_block + offset * k_stride_slot + (head - NUM_HEADS) * (2 * HALF) + d
    is_k = real & (head >= NUM_HEADS) & (head < NUM_HEADS + KV_HEADS)
    tl.store(k_ptr, turned_first, mask=is_k)
    tl.store(k_ptr + HALF, turned_second, mask=is_k)
    v_head = head - (NUM_HEADS + KV_HEADS)
    v_ptr = v_cache_ptr + block * v_stride_block + offset * v_stride_slot + v_head * (2 * HALF) + d
    tl.store(v_ptr, first_raw, mask=real & is_v)
    tl.store(v_ptr + HALF, second_raw, mask=real & is_v)


def rope_and_write_kv(qkv: Tensor, rotation: Rotation) -> None:
    """``types.RopeAndWriteKV``, rounded once. Caches may be strided but for heads and their numbers."""
    num_heads, norm, cos, sin, k_cache, v_cache, slot_mapping = rotation
    rows, heads, head_dim = qkv.shape
    assert qkv.stride()[1:] == k_cache.stride()[2:] == v_cache.stride()[2:] == (head_dim, 1)
    half = triton.next_power_of_2(head_dim // 2)
    block_heads = max(1, _PROGRAM // half)
    q_weight, k_weight, eps = norm or QKNorm(cos, cos, 0.0)  # the former two unread
    if rows:
        rope_and_write_kv_kernel[(rows, triton.cdiv(heads, block_heads))](
            qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, slot_mapping, eps,
            qkv.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2],
            NUM_HEADS=num_heads, KV_HEADS=k_cache.shape[2], HALF=head_dim // 2, BLOCK_SIZE=k_cache.shape[1],
            NORM=norm is not None, BLOCK_HEADS=block_heads, BLOCK_HALF=half, num_warps=4,
        )  # fmt: skip
