"""Fills a model from a folder's safetensors, tensor by tensor, straight into its fused place; or at random."""

from __future__ import annotations

from pathlib import Path

import torch
from punica_batch_kernels.backend import REFERENCE, Kernels
from safetensors import SafetensorError, safe_open
from torch import Tensor

from punica_batch.errors import ModelError
from punica_batch.models.config import ModelConfig
from punica_batch.models.files import weight_files
from punica_batch.models.llama import LlamaModel

FLOATING = {"F64", "F32", "F16", "BF16"}


def load_model(
    config: ModelConfig,
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: Kernels = REFERENCE,
) -> LlamaModel:
    """The model with the folder's weights, converted to ``dtype``; at no time is more than one tensor held twice.

    Raises ``ModelError`` naming the file and tensor when one is missing, not the model's, of another shape, not
    floating point, or there twice.
    """
    folder = Path(folder)
    model = LlamaModel(config, dtype, device, kernels)
    places = model.named_tensors()
    missing = set(places)
    for path in weight_files(folder):
        try:
            missing -= _place_file(path, places, missing, tied=config.tie_word_embeddings)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing from the weights, first {min(missing)}")
    return model


def _place_file(path: Path, places: dict[str, Tensor], missing: set[str], *, tied: bool) -> set[str]:
    """Copies one file's tensors to their places; returns their names."""
    placed: set[str] = set()
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            # Old checkpoints stored the rotary frequencies; a tied head is the embedding, whatever is stored.
            if name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue
            place = places.get(name)
            if place is None:
                raise ModelError(f"{path}: tensor {name} is not part of this architecture")
            if name not in missing or name in placed:
                raise ModelError(f"{path}: tensor {name} is in the weights twice")
            stored = file.get_slice(name)
            if tuple(stored.get_shape()) != tuple(place.shape):
                raise ModelError(
                    f"{path}: tensor {name} has shape {list(stored.get_shape())}, config.json needs {list(place.shape)}"
                )
            if stored.get_dtype() not in FLOATING:
                raise ModelError(f"{path}: tensor {name} is {stored.get_dtype()}: quantised weights are not supported")
            place.copy_(file.get_tensor(name))
            placed.add(name)
    return placed


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    kernels: Kernels = REFERENCE,
) -> LlamaModel:
    """A model of random weights (normal, deviation 0.02; norms 1), for benchmarks: same shapes and cost, no files."""
    model = LlamaModel(config, dtype, device, kernels)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, place in model.named_tensors().items():
        if name.endswith("norm.weight"):
            place.fill_(1)
        else:
            place.normal_(0, 0.02, generator=generator)
    return model
