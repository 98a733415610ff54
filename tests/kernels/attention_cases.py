"""Steps of paged attention over shuffled, NaN-filled caches, and a float64 softmax a token to hold against them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from punica_batch_kernels.attention import reference
from punica_batch_kernels.attention.types import AttentionMetadata
from torch import Tensor

BLOCK = 16
HEAD_DIM = 8
TOLERANCE = {
    torch.float32: {"atol": 2e-6, "rtol": 1e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}


class Case:
    """Sequences of (rows this step, keys in all), with their keys written to shuffled blocks of NaN-filled caches."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        seed: int = 0,
        head_dim: int = HEAD_DIM,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Prefills first, decodes last.
        self.lengths = [x for x in lengths if x[0] > 1] + [x for x in lengths if x[0] == 1]
        self.keys = [torch.randn(kv, kv_heads, head_dim, generator=generator) for _, kv in self.lengths]
        self.values = [torch.randn(kv, kv_heads, head_dim, generator=generator) for _, kv in self.lengths]
        rows = sum(q for q, _ in self.lengths)
        # strided, as the model's are, which lie beside the keys; NaN there
        beside = torch.full((rows, heads + kv_heads, head_dim), math.nan)
        self.q = beside[:, :heads].copy_(torch.randn(rows, heads, head_dim, generator=generator))
        counts = [-(-kv // BLOCK) for _, kv in self.lengths]
        free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        tables = np.zeros((len(lengths), max(counts)), np.int32)
        self.k_cache = torch.full((len(free), BLOCK, kv_heads, head_dim), math.nan)
        self.v_cache = self.k_cache.clone()
        slots: list[int] = []
        for s, (q, kv) in enumerate(self.lengths):
            blocks = [free.pop() for _ in range(counts[s])]
            tables[s, : counts[s]] = blocks
            mapping = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(kv)]
            slots += mapping[kv - q :]
            old = torch.tensor(mapping[: kv - q], dtype=torch.int64)
            reference.write_kv(
                self.keys[s][: kv - q], self.values[s][: kv - q], self.k_cache, self.v_cache, old
            )  # what earlier steps wrote
        starts = np.cumsum([0] + [q for q, _ in self.lengths])
        kv_lens = [kv for _, kv in self.lengths]
        prefills = [q for q, _ in self.lengths if q > 1]
        self.meta = AttentionMetadata(
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            qo_indptr=starts.astype(np.int32),
            kv_lens=np.array(kv_lens, np.int32),
            block_tables=tables,
            num_prefills=len(prefills),
            num_prefill_tokens=sum(prefills),
        )
        new_k = torch.cat([k[kv - q :] for k, (q, kv) in zip(self.keys, self.lengths, strict=True)])
        new_v = torch.cat([v[kv - q :] for v, (q, kv) in zip(self.values, self.lengths, strict=True)])
        reference.write_kv(new_k, new_v, self.k_cache, self.v_cache, self.meta.slot_mapping)
        # to the device and dtype; what is expected is of the rounded numbers
        self.q = beside.to(device, dtype)[:, :heads]
        self.k_cache, self.v_cache = self.k_cache.to(device, dtype), self.v_cache.to(device, dtype)
        self.meta = replace(self.meta, slot_mapping=self.meta.slot_mapping.to(device))
        self.keys, self.values = ([t.to(dtype) for t in part] for part in (self.keys, self.values))

    def expected(self, scale: float, window: int | None) -> Tensor:
        out, q_rows = [], self.q.cpu()
        for s, (q, kv) in enumerate(self.lengths):
            group = self.q.shape[1] // self.keys[s].shape[1]
            for r in range(q):
                row, position = q_rows[sum(x for x, _ in self.lengths[:s]) + r].double(), kv - q + r
                first = 0 if window is None else max(0, position - window + 1)
                k = self.keys[s][first : position + 1].double().repeat_interleave(group, dim=1)
                v = self.values[s][first : position + 1].double().repeat_interleave(group, dim=1)
                weights = torch.softmax(torch.einsum("hd,khd->hk", row, k) * scale, dim=-1)
                out.append(torch.einsum("hk,khd->hd", weights, v))
        return torch.stack(out)

    def check(self, window: int | None = None, scale: float = 0.3, paged_attention: Any = None) -> None:
        """``paged_attention``: the reference's by default."""
        run = paged_attention or reference.paged_attention
        got = run(self.q, self.k_cache, self.v_cache, self.meta, scale=scale, window=window)
        assert got.dtype == self.q.dtype
        torch.testing.assert_close(got.double().cpu(), self.expected(scale, window), **TOLERANCE[self.q.dtype])
