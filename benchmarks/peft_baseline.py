"""HF transformers + PEFT over rows of mixed adapters (``adapter_names``), in static batches: what most scripts do.

    python benchmarks/peft_baseline.py MODEL ADAPTERS ROWS.json NEW_TOKENS BATCH THREADS

ROWS.json: [{"prompt": text, "lora_id": folder name or null}]. Prints one JSON line: tokens, seconds, tokens a second.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    model_folder, adapters, rows_file, new, batch_size, threads = sys.argv[1:7]
    torch.set_num_threads(int(threads))
    rows = json.loads(Path(rows_file).read_text())
    names = sorted({row["lora_id"] for row in rows if row["lora_id"] is not None})
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, f"{adapters}/{names[0]}", adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(f"{adapters}/{name}", adapter_name=name)
    model.eval()
    start = time.perf_counter()
    tokens = 0
    with torch.inference_mode():
        for first in range(0, len(rows), int(batch_size)):
            batch = rows[first : first + int(batch_size)]
            inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True)
            output = model.generate(
                **inputs,
                adapter_names=[row["lora_id"] or "__base__" for row in batch],
                max_new_tokens=int(new),
                min_new_tokens=int(new),
                do_sample=False,
            )
            tokens += output[:, inputs["input_ids"].shape[1] :].numel()
    seconds = time.perf_counter() - start
    print(json.dumps({"engine": "peft mixed", "tokens": tokens, "seconds": seconds, "tok_s": tokens / seconds}))


if __name__ == "__main__":
    main()
