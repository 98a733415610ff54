"""Fills a model from a folder's safetensors, each tensor straight into its fused place; or at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from punica_batch_kernels.backend import REFERENCE, Kernels
from safetensors import SafetensorError, safe_open
from torch import Tensor

from punica_batch.errors import ModelError
from punica_batch.models.checkpoint import StoredTensor, check_unchanged, stored_tensors
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.stream import stream_weights

RandomWeights = Literal["normal", "vllm-dummy"]
_DUMMY = 1e-3  # the bound of the values that vLLM's ``load_format="dummy"`` draws


def load_model(
    config: ModelConfig,
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: Kernels = REFERENCE,
) -> LlamaModel:
    """The model with the folder's weights, converted to ``dtype``; in host memory at most one tensor is held twice, and
    beside a GPU no more than small buffers.

    Raises ``ModelError`` naming the file and tensor when one is missing, not the model's, of another shape, not
    floating point, or there twice, before the model takes memory.
    """
    stored = stored_tensors(config, Path(folder))
    model = LlamaModel(config, dtype, device, kernels)
    if model.device.type == "cuda":
        stream_weights(stored, model.named_tensors(), model.device)
    else:
        _copy_weights(stored, model.named_tensors())
    return model


def _copy_weights(stored: Sequence[StoredTensor], places: Mapping[str, Tensor]) -> None:
    for path, tensors in groupby(stored, key=lambda tensor: tensor.path):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for tensor in tensors:
                    check_unchanged(tensor, path)
                    places[tensor.name].copy_(file.get_tensor(tensor.name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    kernels: Kernels = REFERENCE,
    values: RandomWeights = "normal",
) -> LlamaModel:
    """A model of random weights, for benchmarks: same shapes and cost, no files. ``normal``: of deviation 0.02,
    norms 1; ``vllm-dummy``: all uniform in ±0.001, norms too, as vLLM makes them (``initialize_dummy_weights``)."""
    model = LlamaModel(config, dtype, device, kernels)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, place in model.named_tensors().items():
        if values == "vllm-dummy":
            place.uniform_(-_DUMMY, _DUMMY, generator=generator)
        elif name.endswith("norm.weight"):
            place.fill_(1)
        else:
            place.normal_(0, 0.02, generator=generator)
    return model
