"""config.json: each key honoured, known harmless, or refused by name; sizes and digests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_harness import ARCHITECTURES, LLAMA3_ROPE, SIZES, save_hf_model
from safetensors.torch import load_file, save_file

from punica_batch.errors import ModelError
from punica_batch.models.config import ModelConfig, RopeConfig, model_digest, resolve_model

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "rms_norm_eps": 1e-5}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_shapes_and_sizes_equal_hugging_face(name: str, tmp_path: Path) -> None:
    save_hf_model(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    shapes = {k: tuple(v.shape) for k, v in model.named_parameters()}
    assert config.tensor_shapes() == shapes
    assert config.weight_bytes("bfloat16") == 2 * sum(p.numel() for p in model.parameters())
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    modules = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, kinds)}
    modules["model.embed_tokens"] = modules["model.embed_tokens"][::-1]
    assert config.lora_modules() == modules
    keys = 16 * config.num_key_value_heads * config.head_dim
    assert config.kv_bytes_per_block(16, "float32") == 2 * 4 * keys * config.num_hidden_layers


def test_transformers_4_and_5_spellings_agree() -> None:
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    four = LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    five = LLAMA | {"rope_parameters": LLAMA3_ROPE, "dtype": "bfloat16"}
    assert ModelConfig.from_dict(four) == ModelConfig.from_dict(five)
    assert ModelConfig.from_dict(five).rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)
    assert ModelConfig.from_dict(five).torch_dtype == "bfloat16"
    older = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert ModelConfig.from_dict(older).rope == RopeConfig(10000.0, "linear", 2.0)


def test_what_a_config_leaves_out_is_hugging_faces_default() -> None:
    short = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    config = ModelConfig.from_dict(short)
    theirs = transformers.LlamaConfig(**short)
    assert config.num_key_value_heads == theirs.num_key_value_heads
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert ModelConfig.from_dict(MISTRAL).sliding_windows == (transformers.MistralConfig().sliding_window,) * 3
    assert ModelConfig.from_dict(MISTRAL | {"sliding_window": None}).sliding_windows == (None,) * 3
    assert ModelConfig.from_dict(QWEN3).head_dim == transformers.Qwen3Config().head_dim
    assert ModelConfig.from_dict(QWEN2).head_dim == 12
    assert ModelConfig.from_dict(LLAMA).rope.theta == 10000.0


def test_qwen_windows() -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert ModelConfig.from_dict(QWEN2 | {"sliding_window": 8}).sliding_windows == (None,) * 3
    assert ModelConfig.from_dict(QWEN2 | on | {"max_window_layers": 1}).sliding_windows == (None, 8, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert ModelConfig.from_dict(QWEN3 | on | {"layer_types": types}).sliding_windows == (8, None, 8)
    assert ModelConfig.from_dict(QWEN2 | on | {"sliding_window": None}).sliding_windows == (None,) * 3


def test_known_harmless_keys_pass() -> None:
    smollm2 = {
        "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "use_cache": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "attention_dropout": 0.0,
        "initializer_range": 0.04, "transformers_version": "4.42.3", "hidden_act": "silu", "bos_token_id": 1,
        "pad_token_id": 2, "rope_scaling": None, "quantization_config": None, "some_future_key": None,
    }  # fmt: skip
    assert ModelConfig.from_dict(LLAMA | smollm2) == ModelConfig.from_dict(LLAMA)


REFUSED: list[tuple[dict[str, Any], str, object]] = [
    (LLAMA, "architectures", ["GemmaForCausalLM"]),
    (LLAMA, "architectures", []),
    (LLAMA, "architectures", ["LlamaForSequenceClassification"]),
    (LLAMA, "model_type", "mistral"),
    (LLAMA, "quantization_config", {"quant_method": "gptq"}),
    (LLAMA, "auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
    (LLAMA, "hidden_act", "gelu"),
    (LLAMA, "partial_rotary_factor", 0.5),
    (LLAMA, "rope_interleaved", True),
    (LLAMA, "final_logit_softcapping", 30.0),
    (LLAMA, "attn_logit_softcapping", 50.0),
    (LLAMA, "residual_multiplier", 0.22),
    (LLAMA, "logits_scaling", 8.0),
    (LLAMA, "clip_qkv", 8.0),
    (LLAMA, "no_rope_layers", [1, 1, 0]),
    (LLAMA, "num_local_experts", 8),
    (LLAMA, "sliding_window", 128),
    (LLAMA, "layer_types", ["full_attention"] * 3),
    (LLAMA, "some_future_key", False),
    (LLAMA, "torch_dtype", "float8_e4m3fn"),
    (LLAMA, "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    (LLAMA, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
    (LLAMA, "rope_scaling", {"type": "linear"}),
    (LLAMA, "rope_scaling", {"type": "linear", "factor": 2.0, "attention_factor": 1.2}),
    (LLAMA, "rope_parameters", {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}),
    (LLAMA, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    (LLAMA, "rope_theta", -1),
    (LLAMA, "vocab_size", "97"),
    (LLAMA, "num_key_value_heads", 3),
    (LLAMA, "num_attention_heads", 5),
    (LLAMA, "head_dim", 7),
    (LLAMA, "eos_token_id", "2"),
    (LLAMA, "tie_word_embeddings", "yes"),
    (MISTRAL, "attention_bias", True),
    (QWEN2, "mlp_bias", True),
    (QWEN2, "use_mrope", True),
    (QWEN2, "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    (QWEN2, "layer_types", ["full_attention"]),
    (QWEN3, "layer_types", ["linear_attention"] * 3),
]


@pytest.mark.parametrize(("base", "key", "value"), REFUSED, ids=[f"{k}-{i}" for i, (_, k, _) in enumerate(REFUSED)])
def test_what_is_not_honoured_is_refused_by_name(base: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(base | {key: value}, where="m/config.json")
    message = str(caught.value)
    assert message.startswith("m/config.json: ")
    assert "\n" not in message
    assert key in message


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "architectures"])
def test_a_missing_size_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        ModelConfig.from_dict({k: v for k, v in LLAMA.items() if k != key})


def test_eos_ids_of_generation_config_come_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 7], "temperature": 0.6}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 2, 7)


def test_dtype_falls_back_to_the_stored_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path).torch_dtype == "float32"
    save_file({"x": torch.zeros(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert ModelConfig.from_folder(tmp_path).torch_dtype == "float16"


@pytest.mark.parametrize("content", [None, "{", "[]", "\xff"])
def test_an_unreadable_config_is_a_model_error(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_no_torch_is_imported() -> None:
    code = "import sys, punica_batch.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestDigest:
    def test_tells_models_apart_and_survives_a_copy(self, tmp_path: Path) -> None:
        first, copy = tmp_path / "a", tmp_path / "b"
        save_hf_model("qwen2", first)
        copy.mkdir()
        for path in first.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        assert model_digest(first) == model_digest(copy)
        weights = load_file(first / "model.safetensors")
        save_file({k: v + 1 for k, v in weights.items()}, copy / "model.safetensors", metadata={"format": "pt"})
        assert model_digest(first) != model_digest(copy), "a fine-tune of the same shapes is another model"

    def test_config_and_eos_count(self, tmp_path: Path) -> None:
        save_hf_model("llama2", tmp_path)
        before = model_digest(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
        changed = model_digest(tmp_path)
        assert changed != before
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
        assert model_digest(tmp_path) != changed


class TestResolve:
    def test_a_folder_is_itself(self, tmp_path: Path) -> None:
        assert resolve_model(str(tmp_path)) == tmp_path

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere"])
    def test_a_path_that_is_not_there_never_reaches_the_hub(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
        with pytest.raises(ModelError, match="does not exist"):
            resolve_model(name)

    def test_no_credentials_are_shown_and_the_right_flag_is_named(self) -> None:
        with pytest.raises(ModelError) as caught:
            resolve_model("https://user:hunter2@host/a/b?token=hunter2", kind="tokenizer")
        assert str(caught.value).startswith("tokenizer folder https://host/a/b does not exist: give --tokenizer ")
        assert "hunter2" not in str(caught.value)

    def test_offline_is_one_clear_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*args: object, **kwargs: object) -> str:
            raise OSError("a long\nstory")

        monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
        with pytest.raises(ModelError) as caught:
            resolve_model("someone/some-model")
        assert "someone/some-model" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_hub_name_downloads_no_pickle_and_no_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: dict[str, Any] = {}

        def download(name: str, **kwargs: Any) -> str:
            asked.update(kwargs, name=name)
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert resolve_model("someone/some-model", "v2") == tmp_path
        assert asked["revision"] == "v2"
        assert not any(p.endswith((".bin", ".py", "*")) for p in asked["allow_patterns"])
