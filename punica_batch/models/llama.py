"""The decoder that all supported architectures share: Llama, Mistral, Qwen2, Qwen3, SmolLM. Inference only.

Plain classes that hold tensors: no module tree, no hooks. Projections that share an input are one fused product, for
the base weights and for the adapters alike; the adapters are added by SGMV over the step's segments (Punica, figure 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from punica_batch_kernels.attention.types import AttentionMetadata
from punica_batch_kernels.backend import REFERENCE, Kernels
from punica_batch_kernels.elementwise.types import QKNorm, Rotation
from punica_batch_kernels.sgmv.types import LoraGroup, Segments
from torch import Tensor
from torch.nn import functional

from punica_batch.models.config import ModelConfig
from punica_batch.models.layers import Linear, rope_cos_sin, rope_frequencies
from punica_batch.models.lora import LayerLora, ModelLora


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share. ``plans``: the attention backend's, by window."""

    cos: Tensor
    sin: Tensor
    meta: AttentionMetadata
    plans: Mapping[int | None, Any]
    segments: Segments


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows that are asked for: ``index`` int64 [R], and the R rows' own ``segments``. Of the others a step needs no
    more than the keys and values that they leave in the cache, so they end at the last layer's attention."""

    index: Tensor
    segments: Segments


class DecoderLayer:
    """One block: attention and gated MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.kernels = config, kernels
        self.window = config.sliding_windows[index]
        self.scale = config.head_dim**-0.5
        h, q, kv, m = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size

        def linear(out: int, into: int, bias: bool) -> Linear:
            return Linear.empty(out, into, kernels, bias=bias, dtype=dtype, device=device)

        def vector(size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.qkv = linear(q + 2 * kv, h, config.qkv_bias)
        self.o = linear(h, q, config.o_bias)
        self.gate_up = linear(2 * m, h, config.mlp_bias)
        self.down = linear(h, m, config.mlp_bias)
        self.input_norm, self.post_attention_norm = vector(h), vector(h)
        self.qk_norm: QKNorm | None = None
        if config.qk_norm:
            self.qk_norm = QKNorm(vector(config.head_dim), vector(config.head_dim), config.rms_norm_eps)

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Hugging Face's names to where each tensor lives, fused ones as views."""
        config, m = self.config, self.config.intermediate_size
        sizes = [config.q_size, config.kv_size, config.kv_size]
        tensors = {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self.post_attention_norm,
        }
        if self.qk_norm is not None:
            tensors |= {f"{prefix}.self_attn.q_norm.weight": self.qk_norm.q_weight}
            tensors |= {f"{prefix}.self_attn.k_norm.weight": self.qk_norm.k_weight}
        fused: list[tuple[Linear, list[str], list[int]]] = [
            (self.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], sizes),
            (self.o, ["self_attn.o_proj"], [config.hidden_size]),
            (self.gate_up, ["mlp.gate_proj", "mlp.up_proj"], [m, m]),
            (self.down, ["mlp.down_proj"], [config.hidden_size]),
        ]
        for linear, names, widths in fused:
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is not None:
                    parts = tensor.split_with_sizes(widths)
                    tensors |= {f"{prefix}.{n}.{kind}": part for n, part in zip(names, parts, strict=True)}
        return tensors

    def attend(
        self, residual: Tensor, cache: tuple[Tensor, Tensor], step: StepContext, lora: LayerLora | None
    ) -> Tensor:
        """The heads' outputs, [T, heads * head_dim], for the residual stream ``residual`` [T, hidden]."""
        config, kernels = self.config, self.kernels
        x = kernels.rms_norm(residual, self.input_norm, config.rms_norm_eps)
        heads = config.num_attention_heads
        rotation = Rotation(heads, self.qk_norm, step.cos, step.sin, *cache, step.meta.slot_mapping)
        if lora is not None and kernels.fused is not None and step.segments.all_rows:
            qkv = kernels.fused.rope_and_write_kv(self.qkv.apply, x, lora.qkv, step.segments, rotation)
        else:
            qkv = self._project(self.qkv, x, step.segments, lora.qkv if lora else None)
            qkv = qkv.view(-1, heads + 2 * config.num_key_value_heads, config.head_dim)
            kernels.rope_and_write_kv(qkv, rotation)
        out = kernels.paged_attention(
            qkv[:, :heads], *cache, step.meta, scale=self.scale, window=self.window, plan=step.plans[self.window]
        )
        return out.view(-1, config.q_size)

    def finish(self, heads: Tensor, residual: Tensor, segments: Segments, lora: LayerLora | None) -> None:
        """After ``attend``, of the same rows: adds the attention, then the MLP, to ``residual`` in place."""
        kernels = self.kernels
        self._add_projection(residual, self.o, heads, segments, lora.o if lora else None)
        x = kernels.rms_norm(residual, self.post_attention_norm, self.config.rms_norm_eps)
        if lora is not None and kernels.fused is not None and segments.all_rows:
            x = kernels.fused.silu_and_mul(self.gate_up.apply, x, lora.gate_up, segments)
        else:
            x = kernels.silu_and_mul(self._project(self.gate_up, x, segments, lora.gate_up if lora else None))
        self._add_projection(residual, self.down, x, segments, lora.down if lora else None)

    def _project(self, linear: Linear, x: Tensor, segments: Segments, group: LoraGroup | None) -> Tensor:
        if group is None:
            return linear.apply(x)
        return self.kernels.lora_linear(linear.apply, x, group, segments)

    def _add_projection(
        self, residual: Tensor, linear: Linear, x: Tensor, segments: Segments, group: LoraGroup | None
    ) -> None:
        """The products sum onto the stream: a tensor between them would have to be written and read."""
        if group is None:
            linear.add_to(residual, x)
        else:
            self.kernels.lora_linear(partial(linear.add_to, residual), x, group, segments)


class LlamaModel:
    """The whole decoder. Tensors are uninitialised until ``weights.load_model`` or ``weights.random_weights``."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kernels: Kernels = REFERENCE,
    ) -> None:
        self.config, self.dtype, self.device, self.kernels = config, dtype, torch.device(device), kernels
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = torch.empty(size, dtype=dtype, device=self.device)
        tied = config.tie_word_embeddings
        weight = self.embed_tokens if tied else torch.empty(size, dtype=dtype, device=self.device)
        self.lm_head = Linear(weight, None, kernels)
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=self.device)
        indices = range(config.num_hidden_layers)
        self.layers = [DecoderLayer(config, i, kernels, dtype, self.device) for i in indices]
        self.frequencies = rope_frequencies(config.rope, config.head_dim, self.device)

    def use(self, kernels: Kernels) -> None:
        """Computes with ``kernels`` from now on. Loading weights needs none, so they may be made meanwhile."""
        self.kernels = self.lm_head.kernels = kernels
        for layer in self.layers:
            layer.kernels = kernels
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear.kernels = kernels

    def named_tensors(self) -> dict[str, Tensor]:
        """``config.tensor_shapes()``'s names to where each tensor lives."""
        tensors = {"model.embed_tokens.weight": self.embed_tokens, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self.lm_head.weight
        for i, layer in enumerate(self.layers):
            tensors |= layer.named_tensors(f"model.layers.{i}")
        return tensors

    def plan_attention(self, meta: AttentionMetadata, block_size: int) -> dict[int | None, Any]:
        """What the attention backend has to know of a step before ``forward``, by window. Works on the host."""
        windows = set(self.config.sliding_windows)
        return {w: self.kernels.plan_attention(meta, block_size, window=w) for w in windows}

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        meta: AttentionMetadata,
        plans: Mapping[int | None, Any],
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        segments: Segments,
        lora: ModelLora | None,
        kept: KeptRows | None = None,
    ) -> Tensor:
        """One step over T rows, ordered as ``meta`` and ``segments`` say; ``plans``: ``plan_attention``'s for it.

        ``input_ids``, ``positions`` int [T]; ``kv_caches`` a (keys, values) pair a layer, each [num_blocks, block_size,
        kv_heads, head_dim], into which the step's own keys and values are written. ``lora`` None: no row
        has an adapter. Returns the hidden states after the last norm, [R, hidden], of the ``kept`` rows (None: of all).
        """
        residual = functional.embedding(input_ids, self.embed_tokens)
        if lora is not None:
            self._add_embedding_lora(residual, input_ids, segments, lora)
        cos, sin = rope_cos_sin(positions, self.frequencies)
        step = StepContext(cos, sin, meta, plans, segments)
        for i, layer in enumerate(self.layers):
            layer_lora = lora.layers[i] if lora is not None else None
            heads = layer.attend(residual, kv_caches[i], step, layer_lora)
            if kept is not None and layer is self.layers[-1]:
                heads, residual = heads.index_select(0, kept.index), residual.index_select(0, kept.index)
                segments = kept.segments
            layer.finish(heads, residual, segments, layer_lora)
        return self.kernels.rms_norm(residual, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor, segments: Segments | None, lora: ModelLora | None) -> Tensor:
        """``hidden`` [S, hidden]: rows of ``forward``'s, with their own ``segments`` (None: none adds to the head).
        Returns [S, vocab] of the model's dtype."""
        y = self.lm_head.apply(hidden)
        if lora is not None and segments is not None:
            heads = lora.lm_head.slots
            if any(slot >= 0 and heads[slot] is not None for slot in segments.lora_indices):
                self.kernels.add_lora(y, hidden, lora.lm_head, segments)
        return y

    def _add_embedding_lora(self, x: Tensor, input_ids: Tensor, segments: Segments, lora: ModelLora) -> None:
        starts = segments.seg_indptr
        for i, slot in enumerate(segments.lora_indices):
            weights = lora.embeddings[slot] if slot >= 0 else None
            if weights is not None:
                a, b = weights
                rows = slice(starts[i], starts[i + 1])
                x[rows].addmm_(a.t().index_select(0, input_ids[rows]), b.t())
