"""Prints the accuracy tables of README.md: ``python sample_data/evaluate.py`` (transformers and PEFT, on the CPU).

Every adapter's held-out rows are answered by the base model and by every adapter, greedily. An answer counts when it
is exactly the expected text. A second table takes the likeliest of the job's own labels instead of what was generated:
there guessing scores one over the number of labels, whatever else the model would rather say.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent


class Bench:
    """The sample's model with all its adapters; ``None`` names the base model."""

    def __init__(self) -> None:
        self.registry: dict[str, Any] = tomllib.loads((HERE / "adapters.toml").read_text(encoding="utf-8"))["adapters"]
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "model", padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32)
        first, *others = self.registry
        self.model = PeftModel.from_pretrained(base, HERE / "adapters" / first, adapter_name=first)
        for name in others:
            self.model.load_adapter(HERE / "adapters" / name, adapter_name=name)
        self.model.eval()
        table = pq.read_table(HERE / "heldout.parquet").to_pylist()
        self.rows = {name: [row for row in table if row["lora_id"] == name] for name in self.registry}

    def use(self, name: str | None) -> None:
        if name is None:
            self.model.base_model.disable_adapter_layers()
        else:
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(name)

    def prompts(self, task: str) -> list[str]:
        return [self.registry[task]["prompt_template"].format(prompt=row["prompt"]) for row in self.rows[task]]

    @torch.inference_mode()
    def generated(self, task: str) -> float:
        """The share of the job's rows answered exactly, the end included, within its ``max_tokens``."""
        inputs = self.tokenizer(self.prompts(task), return_tensors="pt", padding=True, return_token_type_ids=False)
        tokens = self.model.generate(**inputs, max_new_tokens=self.registry[task]["max_tokens"], do_sample=False)
        answers = self.tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
        ends = [
            answer.split(self.tokenizer.eos_token)[0] + "$" * (self.tokenizer.eos_token in answer) for answer in answers
        ]
        good = [end == row["expected"] + "$" for end, row in zip(ends, self.rows[task], strict=True)]
        return sum(good) / len(good)

    @torch.inference_mode()
    def chosen(self, task: str) -> float:
        """The share of the job's rows whose likeliest label (by the log-probability of all its tokens) is right."""
        labels = self.registry[task]["labels"]
        scores = torch.stack([self._log_probability(self.prompts(task), label) for label in labels], dim=1)
        best = [labels[index] for index in scores.argmax(dim=1).tolist()]
        return sum(label == row["expected"] for label, row in zip(best, self.rows[task], strict=True)) / len(best)

    def _log_probability(self, prompts: list[str], label: str) -> torch.Tensor:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = torch.tensor(self.tokenizer.encode(label, add_special_tokens=False)).expand(len(prompts), -1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids)], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        tokens = torch.cat([inputs["input_ids"], ids], dim=1)
        logits = self.model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        logits = logits[:, -ids.shape[1] - 1 : -1].log_softmax(dim=-1)
        return logits.gather(-1, ids[..., None]).squeeze(-1).sum(dim=1)


def print_table(corner: str, columns: list[str], rows: dict[str, list[str]]) -> None:
    print(f"| {corner} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()


def main() -> None:
    bench = Bench()
    names = list(bench.registry)
    classifiers = [name for name in names if "labels" in bench.registry[name]]
    generated: dict[str, list[str]] = {task: [] for task in names}
    chosen: dict[str, list[str]] = {task: [f"{1 / len(bench.registry[task]['labels']):.2f}"] for task in classifiers}
    for answering in (None, *names):
        bench.use(answering)
        for task in names:
            generated[task].append(f"{bench.generated(task):.2f}")
        for task in classifiers:
            chosen[task].append(f"{bench.chosen(task):.2f}")
    print_table("rows of", ["base", *names], generated)
    print_table("rows of", ["guessing", "base", *names], chosen)


if __name__ == "__main__":
    main()
