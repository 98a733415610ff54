"""Weights streamed to a GPU are the files', bit for bit or as torch converts them, whatever the pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from model_harness import save_hf_model
from safetensors.torch import load_file

from punica_batch.errors import ModelError
from punica_batch.models import weights
from punica_batch.models.checkpoint import stored_tensors
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.stream import stream_weights
from punica_batch.models.weights import load_model

CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_every_tensor_lands_in_its_place(tmp_path: Path, name: str, stored: torch.dtype, dtype: torch.dtype) -> None:
    save_hf_model(name, tmp_path, stored)
    want = load_file(tmp_path / "model.safetensors")
    got = load_model(ModelConfig.from_folder(tmp_path), tmp_path, dtype, CUDA).named_tensors()
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key].cpu(), tensor.to(CUDA).to(dtype).cpu()), key


@pytest.mark.parametrize("piece_bytes", [8, 1000, 4096])
@pytest.mark.parametrize("threads", [1, 5])
def test_small_pieces_of_shards(tmp_path: Path, threads: int, piece_bytes: int) -> None:
    save_hf_model("qwen2", tmp_path / "one")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    config = ModelConfig.from_folder(tmp_path / "many")
    ours = LlamaModel(config, torch.float32, CUDA)
    for tensor in ours.named_tensors().values():
        tensor.fill_(float("nan"))
    stored = stored_tensors(config, tmp_path / "many")
    assert len({tensor.path for tensor in stored}) > 2
    stream_weights(stored, ours.named_tensors(), CUDA, threads=threads, piece_bytes=piece_bytes)
    want = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(tensor.cpu(), want[key]) for key, tensor in ours.named_tensors().items())


def test_a_file_changed_after_its_header_was_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf_model("llama2", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    stored = stored_tensors(config, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr(weights, "stored_tensors", lambda *_: stored)
    with pytest.raises(ModelError, match=r"model\.safetensors.* was changed"):
        load_model(config, tmp_path, torch.float16, CUDA)
