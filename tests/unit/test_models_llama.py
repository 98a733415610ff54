"""Every architecture against Hugging Face's own implementation: whole prompts, chunks and decode, through the cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from model_harness import ARCHITECTURES, Driver, hf_logits, save_hf_model
from punica_batch_kernels.sgmv.types import SlotWeights
from torch import Tensor

from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora
from punica_batch.models.weights import load_model, random_weights

LENGTHS = (1, 2, 15, 16, 17, 32, 33, 41)


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (n,), generator=generator) for n in LENGTHS]


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_hf_model(request.param, folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return load_model(ModelConfig.from_folder(folder), folder, dtype)


def worst(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_logits_equal_hugging_face(folder: Path, prompts: list[Tensor]) -> None:
    eager, sdpa = hf_logits(folder, prompts, "eager"), hf_logits(folder, prompts, "sdpa")
    assert min(float(x.std()) for x in eager) > 0.5, "logits too flat to prove anything"
    tolerance = max(1e-4, 2 * worst(eager, sdpa))
    assert tolerance < 1e-2
    model = load(folder)
    for plan in ("whole", "chunks", "decode"):
        got = Driver(model, prompts).run(plan)
        assert worst(got, eager) <= tolerance, plan


@pytest.mark.parametrize("mutation", ["rope", "layer", "window", "norm"])
def test_the_comparison_can_fail(mutation: str, tmp_path: Path, prompts: list[Tensor]) -> None:
    save_hf_model("mistral", tmp_path)
    eager = hf_logits(tmp_path, prompts, "eager")
    model = load(tmp_path)
    if mutation == "rope":
        model.frequencies.mul_(1.01)
    elif mutation == "layer":
        for name, tensor in model.named_tensors().items():
            if name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"):
                tensor.zero_()
    elif mutation == "window":
        for layer in model.layers:
            layer.window = 20
        model.config = dataclasses.replace(model.config, sliding_windows=(20, 20, 20))
    else:
        model.norm.mul_(1.001)
    assert worst(Driver(model, prompts).run("chunks"), eager) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["smollm", "qwen3"])
def test_half_precision_errs_at_most_twice_as_much_as_hugging_face(
    name: str, dtype: torch.dtype, tmp_path: Path, prompts: list[Tensor]
) -> None:
    save_hf_model(name, tmp_path, dtype)
    exact = hf_logits(tmp_path, prompts, "eager")  # the same rounded weights, computed in float32
    theirs = torch.cat(hf_logits(tmp_path, prompts, "eager", dtype)) - torch.cat(exact)
    ours = torch.cat(Driver(load(tmp_path, dtype), prompts).run("chunks")) - torch.cat(exact)
    assert ours.pow(2).mean().sqrt() <= 2 * theirs.pow(2).mean().sqrt()
    assert ours.abs().max() <= 2 * theirs.abs().max()


def test_a_row_alone_equals_the_row_in_a_batch(tmp_path: Path, prompts: list[Tensor]) -> None:
    save_hf_model("llama31", tmp_path)
    model = load(tmp_path)
    together = Driver(model, prompts).run("decode")
    alone = [Driver(model, [p]).run("whole")[0] for p in prompts]
    assert worst(together, alone) <= 1e-4


def randomise(lora: ModelLora, config: ModelConfig, slot: int, rank: int, only: str | None = None) -> dict[str, Tensor]:
    """Fills one slot; returns each module's dense update B A, by Hugging Face's name."""
    generator = torch.Generator().manual_seed(slot)
    shapes = config.lora_modules()
    updates: dict[str, Tensor] = {}

    def pair(name: str) -> tuple[Tensor, Tensor]:
        out, into = shapes[name]
        a = torch.randn(rank, into, generator=generator) * 0.2
        b = torch.randn(out, rank, generator=generator) * 0.2
        updates[name] = b @ a
        return a, b

    def fill(names: list[str]) -> SlotWeights | None:
        pairs = [pair(n) if only is None or n.endswith(only) else None for n in names]
        if not any(pairs):
            return None
        a = torch.cat([p[0] for p in pairs if p is not None])
        ranks = tuple(rank if p is not None else 0 for p in pairs)
        return SlotWeights(a, tuple(p[1] if p is not None else None for p in pairs), ranks)

    for i, layer in enumerate(lora.layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        layer.qkv.slots[slot] = fill([f"{attention}.{p}_proj" for p in "qkv"])
        layer.o.slots[slot] = fill([f"{attention}.o_proj"])
        layer.gate_up.slots[slot] = fill([f"{mlp}.gate_proj", f"{mlp}.up_proj"])
        layer.down.slots[slot] = fill([f"{mlp}.down_proj"])
    lora.lm_head.slots[slot] = fill(["lm_head"])
    if only is None or only == "embed_tokens":
        lora.embeddings[slot] = pair("model.embed_tokens")
    return updates


@pytest.mark.parametrize("name", ["llama3", "smollm", "qwen2"])
def test_adapters_equal_merged_weights(name: str, tmp_path: Path, prompts: list[Tensor]) -> None:
    """A mixed batch, base rows between, equals for each row the model with that row's update added to its weights."""
    save_hf_model(name, tmp_path)
    model = load(tmp_path)
    lora = ModelLora.empty(model.config, num_slots=5)
    updates = {
        0: randomise(lora, model.config, 0, rank=3),
        1: randomise(lora, model.config, 1, rank=8),
        2: randomise(lora, model.config, 2, rank=2, only="v_proj"),
        4: randomise(lora, model.config, 4, rank=1, only="embed_tokens"),
        -1: {},
    }
    slots = [0, 0, 1, -1, 2, 4, 1, -1]
    got: dict[str, list[Tensor]] = {}
    for plan in ("whole", "decode"):
        driver = Driver(model, prompts, slots)
        driver.lora = lora
        got[plan] = driver.run(plan)
    base = Driver(model, prompts).run("whole")
    for slot, update in updates.items():
        merged = load(tmp_path)
        if merged.config.tie_word_embeddings:  # an adapter on one end of the tie leaves the other as it is
            merged.lm_head.weight = merged.embed_tokens.clone()
        places = merged.named_tensors() | {"lm_head.weight": merged.lm_head.weight}
        for module, delta in update.items():
            places[f"{module}.weight"].add_(delta.T if module == "model.embed_tokens" else delta)
        want = Driver(merged, prompts).run("whole")
        for row in (r for r, s in enumerate(slots) if s == slot):
            for plan, logits in got.items():
                torch.testing.assert_close(logits[row], want[row], atol=2e-4, rtol=1e-5, msg=f"{plan}, row {row}")
            assert slot < 0 or float((want[row] - base[row]).abs().max()) > 0.05, "the adapter changes the row"


def test_random_weights_are_reproducible_and_run(tmp_path: Path, prompts: list[Tensor]) -> None:
    save_hf_model("qwen3", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    a, b, c = (random_weights(config, torch.float32, seed=s) for s in (1, 1, 2))
    assert a.named_tensors().keys() == config.tensor_shapes().keys()
    assert torch.equal(a.embed_tokens, b.embed_tokens)
    assert not torch.equal(a.embed_tokens, c.embed_tokens)
    assert all(torch.isfinite(x).all() for x in Driver(a, prompts).run("whole"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_as_vllms_dummy_loader_makes_them(tmp_path: Path, dtype: torch.dtype) -> None:
    """Norms are no exception; a uniform variable's deviation is its bound over the root of 3."""
    save_hf_model("qwen3", tmp_path)
    made = random_weights(ModelConfig.from_folder(tmp_path), dtype, values="vllm-dummy").named_tensors()
    bound = float(torch.tensor(0.001).to(dtype))
    assert all(bool((place.abs() <= bound).all()) for place in made.values())
    for values in (made["model.embed_tokens.weight"].flatten(), *(v for k, v in made.items() if "norm" in k)):
        assert float(values.float().std()) == pytest.approx(0.001 / 3**0.5, rel=0.5 if len(values) < 1000 else 0.05)
