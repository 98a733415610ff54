"""Whole steps of a model of random weights, ready to be timed: decode or prefill of equal sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from punica_batch_kernels.attention.types import AttentionMetadata, AttentionShape
from punica_batch_kernels.backend import kernels_for
from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.types import Segments

from punica_batch.adapters.digest import cache_folder
from punica_batch.bench.add_on import fill
from punica_batch.bench.device import Ceilings
from punica_batch.bench.limits import Work, limit_of
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.shapes import shape_config
from punica_batch.engine.kv_cache import KVCache
from punica_batch.engine.lora_pack import groups_of
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora
from punica_batch.models.weights import random_weights

BLOCK_SIZE = 16


class ModelSteps:
    """A model of ``layers`` layers (None: all) with a KV cache for ``kv_tokens`` and ``adapters`` random ones of the
    options' rank on all seven projections, number i in slot i.

    ``note``: what the kernels say where the best ones are missing; ``capturable``: whether a graph may hold a step.
    """

    def __init__(
        self, options: BenchOptions, device: torch.device, *, kv_tokens: int, adapters: int, layers: int | None = None
    ) -> None:
        config = shape_config(options.model_shape)
        if layers is not None:
            config = replace(config, num_hidden_layers=layers, sliding_windows=config.sliding_windows[:layers])
        self.config, self.device = config, device
        self._dtype_name, self.dtype = options.dtype, getattr(torch, options.dtype)
        shape = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        kernels = kernels_for(device, self.dtype, shape, cache=cache_folder())
        self.note, self.capturable = kernels.note, kernels.capturable
        self.model: LlamaModel = random_weights(config, self.dtype, device, kernels=kernels)
        self.cache = KVCache(
            num_layers=config.num_hidden_layers, num_blocks=-(-kv_tokens // BLOCK_SIZE), block_size=BLOCK_SIZE,
            num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=self.dtype, device=device,
        )  # fmt: skip
        for pair in self.cache.layers:
            for pool in pair:
                pool.normal_()
        self._has_adapters = adapters > 0
        self.lora = ModelLora.empty(config, adapters)
        groups = groups_of(self.lora)[:-1]  # not the language model's head
        if adapters:
            fill(groups, [options.rank] * adapters, self.dtype, device)
            if device.type == "cuda":
                self.tables = SlotTables(groups, options.rank, self.dtype, device)

    def step(self, counts: list[int], kv_len: int, segments: Segments, *, head: bool = True) -> Callable[[], None]:
        """The model over sequences that compute ``counts`` rows each, equal ones, and see ``kv_len`` keys at the last:
        embedding to logits of each sequence's last row; without ``head``, to the last norm.

        It is to be timed before the next one is made: attention keeps one plan at a time.
        """
        meta = self._meta(counts, kv_len)
        rows = sum(counts)
        ids = torch.randint(0, self.config.vocab_size, (rows,), device=self.device)
        positions = self._positions(counts, kv_len)
        last = torch.from_numpy(np.cumsum(counts) - 1).to(self.device)
        plans = self.model.plan_attention(meta, BLOCK_SIZE)
        base = Segments.build([0, len(counts)], [-1], self.device)
        lora = self.lora if self._has_adapters else None

        def run() -> None:
            hidden = self.model.forward(ids, positions, meta, plans, self.cache.layers, segments, lora)
            if head:
                self.model.logits(hidden.index_select(0, last), base, lora)

        return run

    def limit(self, ceilings: Ceilings, counts: list[int], kv_len: int, adapters: int, *, head: bool = True) -> float:
        """Seconds of the step's products, attention and adapters' weights, one after the other (``limit_of``)."""
        work = Work(
            tokens=sum(counts), sampled=len(counts) if head else 0, kv_tokens=len(counts) * kv_len,
            pairs=sum(n * kv_len - n * (n - 1) // 2 for n in counts), adapters=tuple(range(adapters)),
        )  # fmt: skip
        sizes = [self.adapter_bytes] * adapters
        return limit_of([work], self.config, self._dtype_name, ceilings, sizes, whole_last_layer=True).seconds

    @property
    def adapter_bytes(self) -> int:
        """Of the adapter in slot 0; all are alike."""
        slots = [group.slots[0] for group in groups_of(self.lora) if group.slots]
        return sum(w.a.nbytes + sum(b.nbytes for b in w.b if b is not None) for w in slots if w is not None)

    def _positions(self, counts: list[int], kv_len: int) -> torch.Tensor:
        return torch.cat([torch.arange(kv_len - n, kv_len) for n in counts]).to(self.device)

    def _meta(self, counts: list[int], kv_len: int) -> AttentionMetadata:
        """Every sequence has blocks of its own."""
        blocks = -(-kv_len // BLOCK_SIZE)
        tables = np.arange(len(counts) * blocks, dtype=np.int32).reshape(len(counts), blocks)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        slots = [
            tables[i, np.arange(kv_len - n, kv_len) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            + np.arange(kv_len - n, kv_len) % BLOCK_SIZE
            for i, n in enumerate(counts)
        ]
        is_prefill = counts[0] > 1
        return AttentionMetadata(
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(self.device),
            qo_indptr=starts,
            kv_lens=np.full(len(counts), kv_len, dtype=np.int32),
            block_tables=tables,
            num_prefills=len(counts) if is_prefill else 0,
            num_prefill_tokens=int(starts[-1]) if is_prefill else 0,
        )


def memory_for(device: torch.device) -> int:
    """Bytes that a benchmark may take: what is free, less a reserve for activations and workspaces."""
    if device.type != "cuda":
        return 1 << 34
    return int(torch.cuda.mem_get_info(device)[0] * 0.92) - (4 << 30)
