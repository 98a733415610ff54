"""What the elementwise kernels take."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class QKNorm(NamedTuple):
    """The norms of each head of the queries and of the keys: weights [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Rotation(NamedTuple):
    """How a layer's queries and keys are rotated, and where its keys and values go.

    ``num_heads`` of the queries. ``cos``, ``sin`` float32 [T, 1, head_dim / 2], contiguous; caches [num_blocks,
    block_size, kv_heads, head_dim]; ``slot_mapping`` int64 [T]: row t goes to slot block * block_size + offset.
    """

    num_heads: int
    norm: QKNorm | None
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor


class RopeAndWriteKV(Protocol):
    """What lies between the fused projection and attention: norms of heads, rotation, and storing keys and values.

    ``qkv`` [T, num_heads + 2 kv_heads, head_dim], contiguous but for its rows: the queries are normed and rotated in
    place, the keys on their way to the cache; what the keys' rows of it hold afterwards is open.
    """

    def __call__(self, qkv: Tensor, rotation: Rotation) -> None: ...
