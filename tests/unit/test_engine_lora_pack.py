"""An adapter's packed buffer: how its matrices lie in it, what the device's tables say of them, and ranks' bound."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_files import HIDDEN, INTERMEDIATE, LAYERS, VOCAB, lora_config, lora_tensors, safetensors_bytes
from punica_batch_kernels.sgmv.slot_table import SlotTables

from punica_batch.engine.lora_pack import PackedAdapter, adapter_loader, groups_of
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import AdapterError, UsageError
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora
from punica_batch.types import AdapterSpec

CONFIG = ModelConfig.from_dict({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
})  # fmt: skip
RANKS = {"a": 3, "b": 2, "c": 5}
SCALE = 4.0


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    specs = {}
    for name, rank in RANKS.items():
        folder = tmp_path / name
        folder.mkdir()
        config = lora_config(r=rank, lora_alpha=SCALE * rank, target_modules=["q_proj", "down_proj"])
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = lora_tensors(rank, "q_proj", rank) | lora_tensors(rank, "down_proj", rank)
        (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
        specs[name] = AdapterSpec(name, str(folder))
    return EngineSettings(model="m", num_blocks=4, max_model_len=8, adapters=specs, max_lora_rank=4)


def load(settings: EngineSettings, name: str) -> PackedAdapter:
    return adapter_loader(settings, LlamaModel(CONFIG, torch.float32))(name)


def test_b_lies_rank_by_rank_with_its_scale(settings: EngineSettings) -> None:
    packed = load(settings, "a")
    qkv = packed.groups[0]
    assert qkv is not None
    assert qkv.ranks == (3, 0, 0)
    stored = lora_tensors(3, "q_proj", 3)["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert qkv.b[0] is not None
    np.testing.assert_allclose(qkv.b[0].numpy(), SCALE * stored, rtol=1e-6)
    for group in filter(None, packed.groups):
        assert group.a.is_contiguous()
        assert all(b is None or b.t().is_contiguous() for b in group.b)


def test_a_rank_above_the_bound_fails_that_adapter(settings: EngineSettings) -> None:
    with pytest.raises(AdapterError, match=r"'c': its rank is 5, .* up to 4: raise max_lora_rank"):
        load(settings, "c")
    with pytest.raises(UsageError, match="max_lora_rank"):
        EngineSettings(model="m", num_blocks=4, max_model_len=8, max_lora_rank=0)


def test_the_tables_follow_the_slots(settings: EngineSettings) -> None:
    """Addresses and ranks of what was put in last; nothing of an adapter that had to go."""
    model_lora = ModelLora.empty(CONFIG, 1)
    tables = SlotTables(groups_of(model_lora), 4, torch.float32, "cpu")
    loader = adapter_loader(settings, LlamaModel(CONFIG, torch.float32))
    store = LoraStore(model_lora, loader, max_loras=1, tables=tables)
    assert not tables.entries.any()
    for name in ("a", "b", "a"):
        store.request(name)
        while not store.ready(name):
            store.wait(1)
            store.poll()
        for i, group in enumerate(groups_of(model_lora)):
            entry, weights = tables.entries[0, i].tolist(), group.slots[0]
            if weights is None:
                assert not any(entry)
            else:
                assert entry[:2] == [RANKS[name], weights.a.data_ptr()]
                assert weights.b[0] is not None
                assert entry[2:4] == [weights.b[0].data_ptr(), RANKS[name]]
    store.close()
