"""Reads a Hugging Face config.json key by key: honoured, or refused by name.

A key is honoured (``ModelConfig`` has a field for it), known to change nothing (``HARMLESS``), or allowed only with the
value that this implementation computes with (``FIXED``); any other key with a non-null value is a ``ModelError``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from punica_batch.errors import ModelError
from punica_batch.types import Dtype

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# architectures entry -> (model_type, Hugging Face's defaults for keys that a config may leave out)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {"max_position_embeddings": 2048}),
    "MistralForCausalLM": (
        "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": ("qwen2", {"num_key_value_heads": 32, "max_position_embeddings": 32768}),
    "Qwen3ForCausalLM": ("qwen3", {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128}),
}

HONOURED = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "eos_token_id",
}  # fmt: skip
HONOURED_BY_TYPE = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
    "qwen3": {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "attention_bias"},
}
# Training, bookkeeping, and generation defaults (of which a job uses none but the EOS ids).
HARMLESS = {
    "transformers_version", "transformers.js_config", "_name_or_path", "name_or_path", "_commit_hash", "use_cache",
    "initializer_range", "pretraining_tp", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "is_llama_config", "is_decoder", "unsloth_version", "unsloth_fixed", "tokenizer_class", "task_specific_params",
    "problem_type", "finetuning_task", "prefix", "id2label", "label2id", "num_labels", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate", "use_return_dict",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "_attn_implementation_internal", "_flash_attn_2_enabled", "_experts_implementation",
    "gradient_checkpointing", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "max_sequence_length",
}  # fmt: skip
# Would change the result: allowed only with these values.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
}
FIXED_BY_TYPE: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {},
    "mistral": {"attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"attention_bias": (True,), "mlp_bias": (False,)},
    "qwen3": {"mlp_bias": (False,)},
}
ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. ``rope_type`` "default"; "linear" (``factor``); "llama3" (all four, Llama 3.1's scaling)."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


class ConfigReader:
    """Typed access to one config.json. Every refusal is a ``ModelError`` that names file, key and value."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where
        names = config.get("architectures") or []
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            raise self.refuse("architectures", names, f"supported are {', '.join(ARCHITECTURES)}")
        self.architecture: str = names[0]
        self.model_type, self.defaults = ARCHITECTURES[self.architecture]
        if config.get("model_type", self.model_type) != self.model_type:
            raise self.refuse("model_type", config["model_type"], f"{self.architecture} is {self.model_type}")
        self._check_keys()

    def refuse(self, key: str, value: object, why: str) -> ModelError:
        text = repr(value)
        return ModelError(f"{self.where}: {key} = {text if len(text) <= 120 else text[:117] + '...'} is refused: {why}")

    def _check_keys(self) -> None:
        fixed = FIXED | FIXED_BY_TYPE[self.model_type]
        known = HONOURED | HONOURED_BY_TYPE[self.model_type] | HARMLESS
        for key, value in self.config.items():
            if value is None or key in known:
                continue
            if key not in fixed:
                raise self.refuse(key, value, "this key is not known here and may change what the model computes")
            if value not in fixed[key]:
                raise self.refuse(key, value, f"only {fixed[key][0]!r} is computed")

    def get(self, key: str) -> Any:
        """The key's value; Hugging Face's default where the key is absent (a null stays a null)."""
        return self.config.get(key, self.defaults.get(key))

    def heads(self) -> tuple[int, int, int]:
        """(attention heads, key/value heads, head_dim), fitting one another."""
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.refuse("num_key_value_heads", kv_heads, f"does not divide num_attention_heads = {heads}")
        if self.get("head_dim") is None and hidden % heads:
            raise self.refuse("hidden_size", hidden, f"is no multiple of num_attention_heads = {heads}")
        head_dim = self.integer("head_dim", hidden // heads)
        if head_dim % 2:
            raise self.refuse("head_dim", head_dim, "rotary embedding needs an even one")
        return heads, kv_heads, head_dim

    def integer(self, key: str, if_null: int | None = None) -> int:
        value = self.get(key)
        value = if_null if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, value, "a positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None, source: Mapping[str, Any] | None = None) -> float:
        value = (self.config if source is None else source).get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refuse(key, value, "a positive number is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.refuse(key, value, "true or false is needed")
        return bool(value)

    def dtype(self, fallback: Dtype) -> Dtype:
        key = "dtype" if self.config.get("dtype") is not None else "torch_dtype"
        value = self.config.get(key)
        if value is None:
            return fallback
        for name in DTYPE_BYTES:
            if str(value).removeprefix("torch.") == name:
                return name
        raise self.refuse(key, value, f"supported are {', '.join(DTYPE_BYTES)}")

    def eos(self, generation_eos: list[Any]) -> tuple[int, ...]:
        ids: list[int] = []
        for value in [*generation_eos, self.config.get("eos_token_id")]:
            several = value if isinstance(value, list) else [] if value is None else [value]
            if any(not isinstance(i, int) or isinstance(i, bool) for i in several):
                raise self.refuse("eos_token_id", value, "an integer or a list of integers is needed")
            ids += several
        return tuple(dict.fromkeys(ids))

    def rope(self) -> RopeConfig:
        """transformers 5's ``rope_parameters``, or 4's ``rope_theta`` and ``rope_scaling``."""
        key = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        scaling = self.config.get(key) or {}
        if not isinstance(scaling, dict):
            raise self.refuse(key, scaling, "an object is needed")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ROPE_KEYS:
            raise self.refuse(f"{key}.rope_type", kind, f"supported are {', '.join(ROPE_KEYS)}")
        for name, value in scaling.items():
            if name == "partial_rotary_factor" and value not in (1, None):
                raise self.refuse(f"{key}.{name}", value, "only 1 is computed")
            known = ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
            if name not in known and value is not None:
                raise self.refuse(f"{key}.{name}", value, f"not known for rope_type {kind!r}")
        theta = self.number("rope_theta", 10000.0, scaling if scaling.get("rope_theta") is not None else None)
        values: dict[str, Any] = {
            name: self.number(name, source=scaling) for name in ROPE_KEYS[kind] if name in scaling
        }
        if kind == "llama3":
            values.setdefault("original_max_position_embeddings", self.integer("max_position_embeddings"))
        missing = ROPE_KEYS[kind] - values.keys()
        if missing:
            raise self.refuse(key, scaling, f"{sorted(missing)[0]} is missing")
        return RopeConfig(theta=theta, rope_type=kind, **values)

    def windows(self, layers: int) -> tuple[int | None, ...]:
        if self.model_type == "llama":
            return (None,) * layers
        if self.model_type == "mistral":
            return (self.integer("sliding_window") if self.get("sliding_window") is not None else None,) * layers
        window = None
        if self.flag("use_sliding_window") and self.config.get("sliding_window", 4096) is not None:
            window = self.integer("sliding_window", 4096)
        types = self.config.get("layer_types")
        if types is None:
            first = self.config.get("max_window_layers", 28)
            if not isinstance(first, int):
                raise self.refuse("max_window_layers", first, "an integer is needed")
            types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
        allowed = {"full_attention"} | ({"sliding_attention"} if window else set())
        if not isinstance(types, list) or len(types) != layers or not set(types) <= allowed:
            raise self.refuse("layer_types", types, f"needs one of {sorted(allowed)} for each of {layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
