"""How often a job's greedy text parts from Hugging Face's: a whole job in half precision against transformers and PEFT.

    python benchmarks/tie_rate.py [--model DIR] [--adapters TOML|DIR] [--rows PARQUET...] [--count 512] [--new 32]
                                  [--dtype float16|bfloat16|float32] [--device cuda|cpu]

The reference is greedy decoding in float32. A row may part from it only at a near-tie: where the reference's own
logit of our token is behind the best by no more than half precision can shift, four times the error that Hugging Face
itself makes there in the job's precision. Counted are the rows that are equal and those that part at near-ties; one
that parts elsewhere is a failure and ends the script with exit code 1. EOS ends no row, so that all have ``--new``
tokens to part in. Rows are taken from the start of each file in turn. Where they name another folder's adapters, they
get this one's in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from punica_batch import JobConfig, run_job
from punica_batch.bench.record import environment

SAMPLE = Path(__file__).parents[1] / "sample_data"
BATCH = 64


@dataclass(frozen=True)
class Row:
    """``text``: the prompt as the model sees it."""

    prompt: str
    text: str
    lora_id: str | None


@dataclass(frozen=True)
class Parting:
    """The first token in which a row differs. ``gap``: of the reference's logits, its own token's over ours."""

    row: int
    at: int
    gap: float
    tolerance: float


class Reference:
    """transformers with every adapter of the rows, in ``dtype``."""

    def __init__(self, model: Path, folders: dict[str, Path], dtype: torch.dtype, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.device = device
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
        self.has_adapters = bool(folders)
        for i, (name, folder) in enumerate(folders.items()):
            if i == 0:
                self.model = PeftModel.from_pretrained(self.model, folder, name, autocast_adapter_dtype=False)
            else:
                self.model.load_adapter(folder, name, autocast_adapter_dtype=False)
        self.model.to(device).eval()

    def use(self, lora_id: str | None) -> None:
        if not self.has_adapters:
            return
        if lora_id is None:
            self.model.base_model.disable_adapter_layers()
        else:
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(lora_id)

    def greedy(self, rows: list[Row], new: int) -> list[list[int]]:
        """``new`` token ids of each row, adapter by adapter."""
        answers: dict[int, list[int]] = {}
        by_adapter: dict[str | None, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            by_adapter[row.lora_id].append(i)
        for lora_id, members in by_adapter.items():
            self.use(lora_id)
            for first in range(0, len(members), BATCH):
                chosen = members[first : first + BATCH]
                answers |= zip(chosen, self._continue([rows[i].text for i in chosen], new), strict=True)
        return [answers[i] for i in range(len(rows))]

    @torch.inference_mode()
    def _continue(self, texts: list[str], new: int) -> list[list[int]]:
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(self.device)
        ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], None
        tokens: list[torch.Tensor] = []
        for _ in range(new):
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            ids, cache = output.logits[:, -1].argmax(dim=-1, keepdim=True), output.past_key_values
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            tokens.append(ids)
        answers: list[list[int]] = torch.cat(tokens, dim=1).tolist()
        return answers

    @torch.inference_mode()
    def logits_after(self, row: Row, tokens: list[int]) -> torch.Tensor:
        """Float32 [V], of the token that follows the row's prompt and ``tokens``."""
        self.use(row.lora_id)
        ids = [*self.tokenizer(row.text)["input_ids"], *tokens]
        return self.model(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1].float()


def partings(
    rows: list[Row], ours: list[list[int]], theirs: list[list[int]], exact: Reference, rounded: Reference
) -> list[Parting]:
    """Where our tokens leave the reference's."""
    found = []
    for i, (row, mine, right) in enumerate(zip(rows, ours, theirs, strict=True)):
        if mine == right:
            continue
        at = next((k for k, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), min(len(mine), len(right)))
        if at == len(mine):
            raise SystemExit(f"row {i} has {len(mine)} tokens and not {len(right)}")
        logits = exact.logits_after(row, right[:at])
        error = float((rounded.logits_after(row, right[:at]) - logits).abs().max())
        found.append(Parting(i, at, float(logits.max() - logits[mine[at]]), max(4 * error, 1e-4)))
    return found


def read_rows(files: list[Path], count: int, names: list[str], templates: dict[str, str]) -> list[Row]:
    """Rows that name adapters there are none of get those there are in turn, and some of them none."""
    turn = [*names, None]
    tables = [pq.read_table(file, columns=["prompt", "lora_id"]).to_pylist() for file in files]
    each = -(-count // len(tables))
    found = [row for table in tables for row in table[:each]][:count]
    rows = []
    for i, row in enumerate(found):
        prompt, lora_id = row["prompt"], row["lora_id"] if row["lora_id"] in turn else turn[i % len(turn)]
        rows.append(Row(prompt, templates.get(lora_id or "", "{prompt}").replace("{prompt}", prompt), lora_id))
    return rows


def read_adapters(path: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Folders and prompt templates by name."""
    if path.is_dir():
        return {folder.name: folder for folder in sorted(path.iterdir()) if folder.is_dir()}, {}
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["adapters"]
    folders = {name: path.parent / entry["path"] for name, entry in entries.items()}
    return folders, {name: e["prompt_template"] for name, e in entries.items() if "prompt_template" in e}


def run_ours(rows: list[Row], options: argparse.Namespace) -> list[list[int]]:
    """The job, from Parquet to Parquet; each row's token ids."""
    with tempfile.TemporaryDirectory() as folder:
        table = {
            "prompt": pa.array([row.prompt for row in rows], pa.string()),
            "lora_id": pa.array([row.lora_id for row in rows], pa.string()),
            "max_tokens": pa.array([options.new] * len(rows), pa.int64()),
        }
        pq.write_table(pa.table(table), f"{folder}/rows.parquet")
        config = JobConfig.model_validate({
            "inputs": (f"{folder}/rows.parquet",), "output": f"{folder}/out.parquet", "model": str(options.model),
            "adapters": str(options.adapters), "device": options.device, "dtype": options.dtype, "ignore_eos": True,
            "logprobs": 0, "apply_chat_template": False, "max_errors": "0",
        })  # fmt: skip
        run_job(config)
        answers: list[list[int]] = pq.read_table(f"{folder}/out.parquet")["token_ids"].to_pylist()
        return answers


def measure(options: argparse.Namespace) -> dict[str, Any]:
    folders, templates = read_adapters(options.adapters)
    rows = read_rows(options.rows, options.count, list(folders), templates)
    folders = {name: folder for name, folder in folders.items() if any(row.lora_id == name for row in rows)}
    ours = run_ours(rows, options)
    exact = Reference(options.model, folders, torch.float32, options.device)
    rounded = Reference(options.model, folders, getattr(torch, options.dtype), options.device)
    found = partings(rows, ours, exact.greedy(rows, options.new), exact, rounded)
    beyond = [parting for parting in found if parting.gap > parting.tolerance]
    for parting in beyond:
        print(f"row {parting.row} parts at token {parting.at}, {parting.gap:.4g} apart: beyond {parting.tolerance:.4g}")
    return {
        "what": "tie_rate", "model": options.model.name, "dtype": options.dtype, "rows": len(rows),
        "new_tokens": options.new, "adapters": len(folders), "equal": len(rows) - len(found),
        "near_ties": len(found) - len(beyond), "beyond_tolerance": len(beyond),
        "tie_rate_rows": len(found) / len(rows), "tie_rate_tokens": len(found) / (len(rows) * options.new),
        "largest_gap": max((parting.gap for parting in found), default=0.0),
        **environment(options.device), "command": " ".join(["python benchmarks/tie_rate.py", *sys.argv[1:]]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE / "model")
    parser.add_argument("--adapters", type=Path, default=SAMPLE / "adapters.toml")
    parser.add_argument(
        "--rows", type=Path, nargs="+", default=[SAMPLE / "requests.parquet", SAMPLE / "heldout.parquet"]
    )
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tie_rate.jsonl")
    options = parser.parse_args()
    line = measure(options)
    print(json.dumps(line))
    with options.out.open("a") as out:
        out.write(json.dumps(line) + "\n")
    sys.exit(1 if line["beyond_tolerance"] else 0)


if __name__ == "__main__":
    main()
