"""Loading: every tensor in its place exactly once, or a ModelError that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from model_harness import save_hf_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from punica_batch.errors import ModelError
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.weights import load_model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return load_model(ModelConfig.from_folder(folder), folder, dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf_model("qwen2", tmp_path)  # biased and tied
    return tmp_path


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Changes tensors of model.safetensors; None removes one. Underscores stand for dots."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.1.self_attn.k_proj.weight"


def test_every_tensor_lands_in_its_place(folder: Path) -> None:
    want = load_file(folder / "model.safetensors")
    model = load(folder)
    got = model.named_tensors()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert model.lm_head.weight is model.embed_tokens
    qkv = model.layers[1].qkv.weight
    assert torch.equal(qkv[48:72], want[NAME]), "the places are views of the fused tensors"


def test_dtype_is_converted(folder: Path) -> None:
    half = load(folder, torch.bfloat16)
    want = load_file(folder / "model.safetensors")[NAME]
    assert torch.equal(half.named_tensors()[NAME], want.bfloat16())


def test_shards_equal_a_single_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load(folder).named_tensors(), load(sharded).named_tensors()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_missing_tensor(folder: Path) -> None:
    rewrite(folder, **{NAME: None})
    with pytest.raises(ModelError, match=NAME):
        load(folder)


def test_an_unexpected_tensor(folder: Path) -> None:
    rewrite(folder, **{"model.layers.1.self_attn.o_proj.bias": torch.zeros(48)})
    with pytest.raises(ModelError, match=r"o_proj\.bias is not part"):
        load(folder)


@pytest.mark.parametrize("shape", [(48, 24), (24 * 48,), (1, 48)])
def test_a_wrong_shape(folder: Path, shape: tuple[int, ...]) -> None:
    rewrite(folder, **{NAME: torch.zeros(shape)})
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, **{NAME: torch.zeros(24, 48).to(dtype)})
    with pytest.raises(ModelError, match="quantised"):
        load(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({NAME: torch.zeros(24, 48)}, folder / "b.safetensors")
    weight_map = {"x": "a.safetensors", NAME: "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="twice"):
        load(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_an_index_that_points_elsewhere(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NAME: name}}))
    with pytest.raises(ModelError, match="weight_map"):
        load(folder)


def test_rotary_buffers_and_a_tied_head_are_ignored_as_hugging_face_does(folder: Path) -> None:
    want = load(folder).named_tensors()
    rewrite(
        folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6), "lm_head.weight": torch.ones(97, 48)}
    )
    got = load(folder)
    assert all(torch.equal(want[name], tensor) for name, tensor in got.named_tensors().items())
    assert got.lm_head.weight is got.embed_tokens


def test_pickle_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\.bin \(pickle\)"):
        load(folder)


@pytest.mark.parametrize("cut", [0, 5, 100, -10])
def test_a_torn_file(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="is missing"):
        load(folder)
