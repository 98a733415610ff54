"""Random PEFT adapters of mixed ranks for a Llama-shaped folder, on all seven projections, with a B that is not zero.

python benchmarks/random_adapters.py MODEL OUT [COUNT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from punica_batch.models.config import ModelConfig

RANKS = (8, 16, 16, 32, 8, 16, 64, 16)


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else len(RANKS)
    modules = {name: shape for name, shape in ModelConfig.from_folder(model).lora_modules().items() if "proj" in name}
    for number in range(count):
        rank, rng = RANKS[number % len(RANKS)], np.random.default_rng(1000 + number)
        tensors = {}
        for name, (width, h_in) in modules.items():
            a = rng.standard_normal((rank, h_in), dtype=np.float32) / np.float32(h_in**0.5)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            b = rng.standard_normal((width, rank), dtype=np.float32) * np.float32(0.02)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
        folder = out / f"adapter-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
            "base_model_name_or_path": model.name,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
