"""The process that ``bench startup`` times: FOLDER DTYPE DEVICE BEGAN, the last by ``time.monotonic``, which all
processes share. Prints one JSON line: seconds in all and by stage."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import cast

from punica_batch.engine.settings import DEFAULT_BATCHED_TOKENS, EngineSettings
from punica_batch.engine.startup import StartupTimes
from punica_batch.types import AdapterSpec, Dtype

_BLOCKS = 8192  # of the KV cache, or as many as fit


def main(root: Path, dtype: Dtype, device: str, began: float) -> None:
    times = StartupTimes()
    times.add("interpreter", time.monotonic() - began)
    with times.stage("import torch"):
        import torch
    with times.stage("other imports"):
        from punica_batch.engine.build import build_engine
    if device != "cpu":
        with times.stage("device"):
            torch.cuda.set_device(torch.device(device).index or 0)  # what names no device goes there, too
    warnings.simplefilter("ignore")
    adapters = {folder.name: AdapterSpec(folder.name, str(folder)) for folder in sorted((root / "adapters").iterdir())}
    files = [folder / "adapter_model.safetensors" for folder in (root / "adapters").iterdir()]
    config = json.loads((root / "adapters" / "adapter0" / "adapter_config.json").read_text())
    settings = EngineSettings(
        model=str(root / "model"), dtype=dtype, kv_cache_dtype=dtype, device=device, num_blocks=_BLOCKS,
        max_num_seqs=256, max_num_batched_tokens=DEFAULT_BATCHED_TOKENS[torch.device(device).type], max_model_len=1024,
        max_loras=len(adapters), max_lora_rank=config["r"], max_lora_bytes=sum(file.stat().st_size for file in files),
        adapters=adapters,
    )  # fmt: skip
    engine = build_engine(settings, times)
    if device != "cpu":
        torch.cuda.synchronize(device)
    print(json.dumps({"whole": time.monotonic() - began, "stages": times.seconds}))
    engine.close()


if __name__ == "__main__":
    folder, its_dtype, its_device, start = sys.argv[1:]
    main(Path(folder), cast("Dtype", its_dtype), its_device, float(start))
