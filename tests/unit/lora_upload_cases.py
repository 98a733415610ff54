"""Adapters of all shapes on disk, loaded the device's way and packed on the host, and that both agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from adapter_files import HIDDEN, INTERMEDIATE, LAYERS, MODULES, SHAPES, VOCAB, lora_config, raw_file
from punica_batch_kernels.sgmv.slot_table import SlotTables

from punica_batch.adapters.digest import DigestCache
from punica_batch.engine.lora_pack import PackedAdapter, adapter_loader, groups_of
from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.lora_upload import DeviceAdapter, DeviceLoader
from punica_batch.engine.settings import EngineSettings
from punica_batch.models.config import ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora
from punica_batch.types import AdapterSpec

CONFIG = ModelConfig.from_dict({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
})  # fmt: skip
PROJECTIONS = [name.rpartition(".")[2] for name in SHAPES]
MAX_RANK = 40
ROOM = 1 << 20


class Device:
    """A model of a dtype, its slots, and both ways of loading into them."""

    def __init__(
        self,
        adapters: dict[str, Path],
        dtype: torch.dtype,
        room: int = ROOM,
        max_loras: int = 2,
        device: str = "cpu",
        digests: DigestCache | None = None,
    ) -> None:
        specs = {name: AdapterSpec(name, str(path)) for name, path in adapters.items()}
        self.settings = EngineSettings(
            model="m", num_blocks=4, max_model_len=8, adapters=specs, max_lora_rank=MAX_RANK, max_loras=max_loras
        )
        self.model = LlamaModel(CONFIG, dtype, device=device)
        self.lora = ModelLora.empty(CONFIG, max_loras)
        self.tables = SlotTables(groups_of(self.lora), MAX_RANK, dtype, device)
        self.memory = torch.full((room // dtype.itemsize,), torch.nan, dtype=dtype, device=device)
        self.load = DeviceLoader(self.settings, self.model, self.tables, self.memory, num_threads=2, digests=digests)
        self.load_by_host = adapter_loader(self.settings, self.model if device == "cpu" else LlamaModel(CONFIG, dtype))

    def store(self, read_ahead: int) -> LoraStore:
        """What loads into all of its slots."""
        return LoraStore(
            self.lora,
            self.load,
            max_loras=self.settings.max_loras,
            read_ahead=read_ahead,
            num_threads=2,
            tables=self.tables,
            arena=self.load.arena,
        )

    def packed(self, adapter: DeviceAdapter) -> torch.Tensor:
        start = adapter.start // self.memory.itemsize
        return self.memory[start : start + adapter.nbytes // self.memory.itemsize]


def write(folder: Path, tensors: dict[str, torch.Tensor], shift: int = 0, **fields: Any) -> Path:
    """An adapter's folder; ``shift``: the header is that much longer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(lora_config(**fields)))
    header, data = {}, b""
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode() + b" " * shift
    (folder / "adapter_model.safetensors").write_bytes(raw_file(text, data))
    return folder


def drawn_tensors(targets: list[str], ranks: dict[str, int], dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(ranks) + sum(ranks.values()))
    tensors, count = {}, 0
    for module, (out, inner) in MODULES.items():
        kind = module.rpartition(".")[2]
        if kind not in targets:
            continue
        suffix = "lora_embedding_{}" if kind == "embed_tokens" else "lora_{}.weight"
        for part, shape in (("A", (ranks[kind], inner)), ("B", (out, ranks[kind]))):
            values = torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{module}.{suffix.format(part)}"] = values.to(dtypes[count % len(dtypes)])
            count += 1
    return tensors


def check_same(device: Device, name: str) -> DeviceAdapter:
    """The device's way against the host's."""
    ours, exact = device.load(name), device.load_by_host(name)
    packed = device.packed(ours)
    assert ours.sha256 == exact.sha256
    # what lies between matrices is nobody's
    values = packed.cpu()
    written = ~torch.isnan(values)
    assert torch.equal(values[written], exact.buffer[: packed.numel()][written])
    assert int(written.sum()) >= sum(w.a.numel() for w in exact.groups if w is not None)
    assert torch.equal(ours.rows, moved_rows(device, exact, packed))
    ours.install(device.lora, 1, device.tables)
    assert torch.equal(device.tables.entries[1].cpu(), ours.rows)
    assert device.lora.touches_ends(1) == (exact.embedding is not None or exact.groups[-1] is not None)
    for here, there in zip(ours.embedding or (), exact.embedding or (), strict=True):
        assert torch.equal(here.cpu(), there)
    if exact.groups[-1] is not None:
        head = device.lora.lm_head.slots[1]
        assert head is not None
        assert torch.equal(head.a.cpu(), exact.groups[-1].a)
        assert head.b[0] is not None
        assert exact.groups[-1].b[0] is not None
        assert torch.equal(head.b[0].cpu(), exact.groups[-1].b[0])
    ours.uninstall(device.lora, 1, device.tables)
    assert not device.lora.touches_ends(1)
    return ours


def moved_rows(device: Device, exact: PackedAdapter, packed: torch.Tensor) -> torch.Tensor:
    """What the tables would say of the host's views if its buffer lay where ours does."""
    moved = []
    for group in exact.groups:
        if group is not None:
            a, *b = (
                None
                if m is None
                else packed.as_strided(m.shape, m.stride(), packed.storage_offset() + m.storage_offset())
                for m in (group.a, *group.b)
            )
            assert a is not None
            group = type(group)(a, tuple(b), group.ranks)
        moved.append(group)
    return device.tables.rows(moved)
