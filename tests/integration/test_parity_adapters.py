"""Every option of an adapter's config that is honoured, against PEFT: all of them side by side in one batch."""

from __future__ import annotations

import shutil
from typing import Any

import parity_tools as tools
import pytest
import torch
from parity_tools import ALL, ARCHITECTURES, TinyModel
from safetensors.torch import load_file, save_file

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"r": 12, "use_rslora": True, "lora_alpha": 8},
    "rank_pattern": {
        "r": 4,
        "rank_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 2, "^model.layers.0.self_attn.k_proj": 3},
        "alpha_pattern": {"q_proj": 3, "v_proj": 30, r".*\.2\.mlp\.up_proj": 7},
    },
    "rslora_patterns": {"r": 4, "use_rslora": True, "rank_pattern": {"o_proj": 9}, "alpha_pattern": {"up_proj": 5}},
    "regex": {"target_modules": r".*\.(0|2)\.self_attn\.(q|v)_proj"},
    "all_linear": {"target_modules": "all-linear", "r": 5},
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["k_proj", "model.layers.0.mlp.up_proj"]},
    "exclude_regex": {"exclude_modules": r".*layers\.1\..*"},
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "one_layer": {"layers_to_transform": 1},
    "only_k": {"target_modules": ["k_proj"]},
    "only_qv": {"target_modules": ["q_proj", "v_proj"], "r": 3},
    "only_up": {"target_modules": ["up_proj"]},
    "only_down": {"target_modules": ["down_proj"]},
    "lm_head": {"target_modules": ["lm_head", "o_proj"], "r": 6},
    "embed_tokens": {"target_modules": ["embed_tokens", "gate_proj"], "r": 7},
    "head_and_embedding": {"target_modules": ["lm_head", "embed_tokens"], "r": 2},
    "everything": {"target_modules": [*ALL, "embed_tokens", "lm_head"], "r": 2, "rank_pattern": {"embed_tokens": 5}},
}
PROMPT, LENGTH = 18, 22


@pytest.fixture(scope="module", params=["mistral", "qwen2"], ids=["untied", "tied"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    torch.set_num_threads(1)
    model = TinyModel.make(tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param], seed=13)
    for i, (name, options) in enumerate(OPTIONS.items()):
        model.add_adapter(name, seed=50 + i, **options)
    return model


def test_every_option_in_one_batch(tiny: TinyModel) -> None:
    names: list[str | None] = [*OPTIONS, None]
    rows = tools.random_rows(names, [LENGTH] * len(names), seed=8)
    rows = [(name, rows[0][1]) for name, _ in rows]  # one text, so that only the adapter tells rows apart
    ours = tools.teacher_forced(tiny.engine(max_num_batched_tokens=150), rows, [PROMPT] * len(rows))
    tolerance = tiny.tolerance(rows)
    for name, mine, theirs in zip(names, ours, tiny.reference(rows), strict=True):
        assert tools.max_error([mine], [theirs]) <= tolerance, name
        if name is not None:
            assert tools.max_error([theirs], [ours[-1]]) > 100 * tolerance, f"{name} is not felt"


def test_adapter_files_in_other_dtypes(tiny: TinyModel) -> None:
    """PEFT saves what it trained in: float16 and bfloat16 files answer as PEFT does with them."""
    rows = tools.random_rows(["plain"], [LENGTH], seed=9)
    spec = tiny.adapters["plain"]
    for dtype in (torch.float16, torch.bfloat16):
        path = f"{spec.path}-{dtype}"
        shutil.copytree(spec.path, path)
        weights = load_file(f"{path}/adapter_model.safetensors")
        save_file({k: v.to(dtype) for k, v in weights.items()}, f"{path}/adapter_model.safetensors", {"format": "pt"})
        other = TinyModel(tiny.folder, tiny.hf, {"plain": tools.AdapterSpec(name="plain", path=path)})
        ours = tools.teacher_forced(other.engine(), rows, [PROMPT])
        assert tools.max_error(ours, other.reference(rows)) <= other.tolerance(rows)
        assert tools.max_error(ours, tiny.reference(rows)) > other.tolerance(rows)
