"""Small adapter folders for the adapters' tests, written without PEFT, and the modules of a tiny model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 8, 12, 20, 3
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
# name -> (out, in), as ModelConfig.lora_modules() gives it
MODULES: dict[str, tuple[int, int]] = {
    "model.embed_tokens": (HIDDEN, VOCAB),
    **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()},
    "lm_head": (VOCAB, HIDDEN),
}


def lora_config(**fields: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        **fields,
    }


def lora_tensors(rank: int = 2, target: str = "q_proj", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (out, inner) in MODULES.items():
        if name.endswith(f".{target}"):
            tensors[f"base_model.model.{name}.lora_A.weight"] = rng.standard_normal((rank, inner)).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_B.weight"] = rng.standard_normal((out, rank)).astype(np.float32)
    return tensors


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """Written by hand, so that the tests can also write what the library would refuse to."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        dtype = {"float32": "F32", "float16": "F16", "int32": "I32"}[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return raw_file(header, data)


def raw_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_adapter(folder: Path, tensors: dict[str, np.ndarray] | bytes | None = None, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(lora_config(**fields)))
    if tensors is None:
        tensors = lora_tensors(fields.get("r", 2))
    content = tensors if isinstance(tensors, bytes) else safetensors_bytes(tensors)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
