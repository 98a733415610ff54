"""Weights in pieces: every byte once, each for its place; and what the headers alone give away."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from model_harness import save_hf_model
from safetensors.torch import load_file, save_file

from punica_batch.errors import ModelError
from punica_batch.models import weights
from punica_batch.models.checkpoint import stored_tensors
from punica_batch.models.config import ModelConfig
from punica_batch.models.stream import TORCH_DTYPES, open_files, pieces, read_into
from punica_batch.models.weights import load_model


@pytest.mark.parametrize("nbytes", [8, 1000, 1 << 20])
def test_pieces_put_together_are_the_tensors(tmp_path: Path, nbytes: int) -> None:
    save_hf_model("qwen2", tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    # an odd tensor moves the others to odd offsets, and dtypes are mixed
    extra = {"model.layers.0.rotary_emb.inv_freq": torch.zeros(3, dtype=torch.int8)}
    norm = "model.norm.weight"
    want[norm] = want[norm].to(torch.bfloat16)
    save_file(want | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = stored_tensors(ModelConfig.from_folder(tmp_path), tmp_path)
    got = {t.name: np.full(t.nbytes, 0xFF, dtype=np.uint8) for t in stored}
    descriptor = os.open(tmp_path / "model.safetensors", os.O_RDONLY)
    for piece in pieces(stored, nbytes):
        item = TORCH_DTYPES[piece.tensor.dtype].itemsize
        assert 0 < piece.count * item <= nbytes
        part = got[piece.tensor.name][piece.start * item : (piece.start + piece.count) * item]
        read_into(descriptor, piece.tensor, piece.offset, part.data)
    os.close(descriptor)
    assert got.keys() == want.keys()
    for tensor in stored:
        values = torch.from_numpy(got[tensor.name]).view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)
        assert torch.equal(values, want[tensor.name]), tensor.name
    elements = sum(piece.count for piece in pieces(stored, nbytes))
    assert elements == sum(tensor.numel() for tensor in want.values())


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    save_hf_model("qwen2", tmp_path)
    path = tmp_path / "model.safetensors"
    stored = stored_tensors(ModelConfig.from_folder(tmp_path), tmp_path)
    last = max(stored, key=lambda tensor: tensor.offset)
    os.truncate(path, last.offset + 8)  # after its header was read
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{last.name} is cut short"):
        read_into(descriptor, last, last.offset, memoryview(bytearray(last.nbytes)))
    os.close(descriptor)
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{last.name} is cut short"):
        stored_tensors(ModelConfig.from_folder(tmp_path), tmp_path)


@pytest.mark.parametrize("way", ["replaced", "written again", "removed"])
def test_a_file_that_changed_since_its_header_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """On a GPU by the descriptor that is read, on the CPU by the path."""
    save_hf_model("qwen2", tmp_path)
    config, path = ModelConfig.from_folder(tmp_path), tmp_path / "model.safetensors"
    stored = stored_tensors(config, tmp_path)
    monkeypatch.setattr(weights, "stored_tensors", lambda *_: stored)
    with ExitStack() as stack:
        (descriptor,) = open_files(stored, stack).values()
        assert os.pread(descriptor, 8, 0) == path.read_bytes()[:8]
    load_model(config, tmp_path, torch.float32)
    before = path.stat()
    if way == "replaced":  # of the same size and time
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(path)
    elif way == "written again":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    else:
        path.unlink()
    why = "cannot be read" if way == "removed" else "was changed"
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{why}"), ExitStack() as stack:
        open_files(stored, stack)
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{why}"):
        load_model(config, tmp_path, torch.float32)


@pytest.mark.parametrize(
    "broken",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [0]},
        {"data_offsets": None},
        {"shape": 3},
        {"dtype": None},
        {"dtype": ["F32"]},
        {"data_offsets": [0.5, 1.5]},
        {"data_offsets": [0, float("inf")]},
        {"data_offsets": ["0", "4"]},
    ],
)
def test_a_header_that_lies(tmp_path: Path, broken: dict[str, object]) -> None:
    save_hf_model("qwen2", tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["model.norm.weight"].update(broken)
    again = json.dumps(header).encode()
    path.write_bytes(len(again).to_bytes(8, "little") + again + content[8 + size :])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        stored_tensors(ModelConfig.from_folder(tmp_path), tmp_path)


def test_tensors_that_share_bytes_or_a_name_are_refused(tmp_path: Path) -> None:
    """As safetensors itself refuses them, through which no byte of these files goes."""
    save_hf_model("qwen2", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    norm, other = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    shared = json.loads(header)
    shared[other]["data_offsets"] = shared[norm]["data_offsets"]
    twice = header.rstrip()[:-1] + b"," + json.dumps({norm: shared[norm]}).encode()[1:]
    nested = b"[" * 100_000
    for broken, why in ((json.dumps(shared).encode(), "instead of"), (twice, "twice"), (nested, "not valid JSON")):
        path.write_bytes(len(broken).to_bytes(8, "little") + broken + data)
        with pytest.raises(ModelError, match=rf"model\.safetensors.*{why}"):
            stored_tensors(config, tmp_path)
