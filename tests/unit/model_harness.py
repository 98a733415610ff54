"""Tiny Hugging Face models on disk, and our model driven step by step through a paged cache."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import transformers
from punica_batch_kernels.attention.types import AttentionMetadata
from punica_batch_kernels.sgmv.types import Segments
from torch import Tensor

from punica_batch.models.llama import KeptRows, LlamaModel
from punica_batch.models.lora import ModelLora

BLOCK = 16
SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

# name -> (Hugging Face config class, what differs from SIZES)
ARCHITECTURES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, object]]] = {
    "llama2": (transformers.LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama31": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "smollm": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_attention_heads": 6, "rms_norm_eps": 1e-5}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 19}),
    "mistral-full": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "qwen3-biased": (transformers.Qwen3Config, {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


def save_hf_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """A random model whose every tensor matters: norms and biases are random too, and the logits spread."""
    config_class, changes = ARCHITECTURES[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**(SIZES | changes)))
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif key.endswith(".bias"):
                tensor.normal_(0, 0.3)
            else:
                tensor.normal_(0, 0.2)
    model.to(dtype).save_pretrained(folder)


def hf_logits(folder: Path, prompts: list[Tensor], attention: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Float32 logits of every position, each prompt on its own: [length, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype)
    with torch.inference_mode():
        return [model(p[None]).logits[0].float() for p in prompts]


class Driver:
    """Runs steps of a model over sequences whose blocks are shuffled in NaN-filled caches; collects all logits."""

    def __init__(self, model: LlamaModel, prompts: list[Tensor], slots: list[int] | None = None) -> None:
        self.model, self.prompts = model, prompts
        self.slots = slots or [-1] * len(prompts)
        self.lora: ModelLora | None = None
        self.done = [0] * len(prompts)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        blocks = [-(-len(p) // BLOCK) for p in prompts]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in blocks]
        config = model.config
        shape = (sum(blocks) + 2, BLOCK, config.num_key_value_heads, config.head_dim)
        self.caches = [
            (torch.full(shape, math.nan, dtype=model.dtype), torch.full(shape, math.nan, dtype=model.dtype))
            for _ in range(config.num_hidden_layers)
        ]

    def step(self, counts: list[int]) -> None:
        """Computes the next ``counts[s]`` tokens of each sequence: several rows first, single rows last."""
        members = [s for s, n in enumerate(counts) if n > 1] + [s for s, n in enumerate(counts) if n == 1]
        starts = np.cumsum([0] + [counts[s] for s in members]).tolist()
        kv_lens = [self.done[s] + counts[s] for s in members]
        positions = [np.arange(self.done[s], end) for s, end in zip(members, kv_lens, strict=True)]
        slots = [
            np.array(self.tables[s])[p // BLOCK] * BLOCK + p % BLOCK for s, p in zip(members, positions, strict=True)
        ]
        tables = np.zeros((len(members), max(len(self.tables[s]) for s in members)), np.int32)
        for i, s in enumerate(members):
            tables[i, : len(self.tables[s])] = self.tables[s]
        prefills = [counts[s] for s in members if counts[s] > 1]
        meta = AttentionMetadata(
            torch.from_numpy(np.concatenate(slots)), np.array(starts, np.int32), np.array(kv_lens, np.int32), tables,
            len(prefills), sum(prefills),
        )  # fmt: skip
        ids = torch.cat([self.prompts[s][p[0] : p[-1] + 1] for s, p in zip(members, positions, strict=True)])
        segments = Segments.build(starts, [self.slots[s] for s in members])
        lora = self.lora if segments.has_lora else None
        rows = torch.from_numpy(np.concatenate(positions))
        last = torch.tensor(starts[1:]) - 1
        kept = KeptRows(last, Segments.build([*range(len(members) + 1)], [self.slots[s] for s in members]))
        with torch.inference_mode():
            plans = self.model.plan_attention(meta, BLOCK)
            hidden = self.model.forward(ids, rows, meta, plans, self.caches, segments, lora)
            alone = self.model.forward(ids, rows, meta, plans, self.caches, segments, lora, kept)
            torch.testing.assert_close(alone, hidden[last], atol=1e-5, rtol=1e-5)
            logits = self.model.logits(hidden, segments, self.lora)
        assert logits.dtype == self.model.dtype
        logits = logits.float()
        for i, s in enumerate(members):
            self.logits[s].append(logits[starts[i] : starts[i + 1]])
            self.done[s] += counts[s]

    def run(self, plan: str) -> list[Tensor]:
        """All positions' logits: "whole" prompts at once, in "chunks" of 7, or 5 tokens then "decode" one by one."""
        first, then = {"whole": (10**9, 1), "chunks": (7, 7), "decode": (5, 1)}[plan]
        lengths = [len(p) for p in self.prompts]
        while self.done != lengths:
            self.step([min(n - d, then if d else first) for n, d in zip(lengths, self.done, strict=True)])
        return [torch.cat(x) for x in self.logits]
