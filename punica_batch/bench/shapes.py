"""The shapes of the models that are measured: their config.json without files. Weights are random."""

from __future__ import annotations

from typing import Any

from punica_batch.models.config import ModelConfig

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip

# name -> config.json: Llama-2-7B, Llama-3-8B (grouped-query attention), Llama-2-13B, and one for tests
SHAPES: dict[str, dict[str, Any]] = {
    "7b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
    "13b": _LLAMA | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 40, "vocab_size": 32000,
    },
    "tiny": _LLAMA | {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024,
    },
}  # fmt: skip


def shape_config(name: str) -> ModelConfig:
    """The model of that shape. ``name`` is a key of ``SHAPES``."""
    return ModelConfig.from_dict(SHAPES[name], where=f"shape {name}")
