"""``ModelConfig``: what a model folder says, and the sizes that follow. No torch: the parent process uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from punica_batch.models.files import model_digest, read_json, resolve_model, stored_dtype
from punica_batch.models.hf_config import DTYPE_BYTES, ConfigReader, RopeConfig
from punica_batch.types import Dtype

__all__ = ["DTYPE_BYTES", "ModelConfig", "RopeConfig", "model_digest", "resolve_model"]

STORED_DTYPES: dict[str, Dtype] = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family. ``sliding_windows``: one a layer; a position sees that many keys, its own
    included (None: all). ``torch_dtype``: the checkpoint's own, by torch's name. ``eos_token_ids``: those of
    generation_config.json, then config.json's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    max_position_embeddings: int
    torch_dtype: Dtype
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads config.json and generation_config.json. Raises ``ModelError`` naming file, key and value."""
        folder = Path(folder)
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = [read_json(generation).get("eos_token_id")] if generation.is_file() else []
        fallback = STORED_DTYPES.get(stored_dtype(folder) or "", "float32")
        return cls.from_dict(config, where=str(folder / "config.json"), generation_eos=eos, fallback_dtype=fallback)

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        where: str = "config.json",
        generation_eos: list[Any] | None = None,
        fallback_dtype: Dtype = "float32",
    ) -> ModelConfig:
        """As ``from_folder``, from config.json's object; ``where`` names it in errors."""
        reader = ConfigReader(dict(config), where)
        heads, kv_heads, head_dim = reader.heads()
        layers = reader.integer("num_hidden_layers")
        attention_bias = reader.flag("attention_bias")
        qwen2 = reader.model_type == "qwen2"
        return cls(
            architecture=reader.architecture,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=reader.rope(),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or qwen2,
            o_bias=attention_bias and not qwen2,
            mlp_bias=reader.flag("mlp_bias"),
            qk_norm=reader.model_type == "qwen3",
            sliding_windows=reader.windows(layers),
            max_position_embeddings=reader.integer("max_position_embeddings"),
            torch_dtype=reader.dtype(fallback_dtype),
            eos_token_ids=reader.eos(generation_eos or []),
        )

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """Every module that an adapter can change, by its Hugging Face name: (out features, in features).

        The embedding counts as a projection of the one-hot token: (hidden, vocab).
        """
        h, m = self.hidden_size, self.intermediate_size
        modules = {"model.embed_tokens": (h, self.vocab_size)}
        for i in range(self.num_hidden_layers):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            modules |= {
                f"{attention}.q_proj": (self.q_size, h),
                f"{attention}.k_proj": (self.kv_size, h),
                f"{attention}.v_proj": (self.kv_size, h),
                f"{attention}.o_proj": (h, self.q_size),
                f"{mlp}.gate_proj": (m, h),
                f"{mlp}.up_proj": (m, h),
                f"{mlp}.down_proj": (h, m),
            }
        return modules | {"lm_head": (self.vocab_size, h)}

    def lora_parameters(self, rank: int, *, layers_only: bool = False) -> int:
        """Of an adapter of ``rank`` in every module, or in those of the layers alone."""
        modules = self.lora_modules().items()
        return rank * sum(out + into for name, (out, into) in modules if not layers_only or ".layers." in name)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the checkpoint must hold, by its Hugging Face name; no lm_head where it is tied."""
        h = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        shapes["model.norm.weight"] = (h,)
        for name, (out, into) in self.lora_modules().items():
            if name == "model.embed_tokens" or (name == "lm_head" and self.tie_word_embeddings):
                continue
            shapes[f"{name}.weight"] = (out, into)
            bias = self.mlp_bias if ".mlp." in name else self.o_bias if name.endswith("o_proj") else self.qkv_bias
            if bias and name != "lm_head":
                shapes[f"{name}.bias"] = (out,)
        for i in range(self.num_hidden_layers):
            layer = f"model.layers.{i}"
            shapes |= {f"{layer}.input_layernorm.weight": (h,), f"{layer}.post_attention_layernorm.weight": (h,)}
            if self.qk_norm:
                head = (self.head_dim,)
                shapes |= {f"{layer}.self_attn.q_norm.weight": head, f"{layer}.self_attn.k_norm.weight": head}
        return shapes

    def num_parameters(self) -> int:
        """Tied weights counted once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def weight_bytes(self, dtype: Dtype) -> int:
        return self.num_parameters() * DTYPE_BYTES[dtype]

    def kv_bytes_per_block(self, block_size: int, dtype: Dtype) -> int:
        """Bytes that one block of ``block_size`` tokens takes in all layers together, keys and values."""
        return 2 * self.num_hidden_layers * block_size * self.kv_size * DTYPE_BYTES[dtype]
