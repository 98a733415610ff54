"""Every architecture through the C kernels, against Hugging Face's own implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_harness import ARCHITECTURES, Driver, hf_logits, save_hf_model
from punica_batch_kernels.attention.types import AttentionShape
from punica_batch_kernels.backend import REFERENCE, Kernels, kernels_for

from punica_batch.models.config import ModelConfig
from punica_batch.models.weights import load_model

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=12)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    kernels = kernels_for(torch.device("cpu"), torch.float32, SHAPE, cache=tmp_path_factory.mktemp("native"))
    if kernels is REFERENCE:
        pytest.skip("no C compiler on this machine")
    return kernels


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_logits_equal_hugging_face(name: str, kernels: Kernels, tmp_path: Path) -> None:
    save_hf_model(name, tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (n,), generator=generator) for n in (1, 2, 15, 16, 17, 33, 41, 150)]
    eager, sdpa = hf_logits(tmp_path, prompts, "eager"), hf_logits(tmp_path, prompts, "sdpa")
    noise = max(float((x - y).abs().max()) for x, y in zip(eager, sdpa, strict=True))
    config = ModelConfig.from_folder(tmp_path)
    for plan in ("whole", "chunks", "decode"):
        model = load_model(config, tmp_path, torch.float32, kernels=kernels)
        for got, want in zip(Driver(model, prompts).run(plan), eager, strict=True):
            torch.testing.assert_close(got, want, atol=max(1e-4, 2 * noise), rtol=0, msg=plan)
