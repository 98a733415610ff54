"""The shipped sample: its size, the shapes that its adapters must have, and what each adapter can and cannot do."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

SAMPLE = Path(__file__).parents[2] / "sample_data"
REGISTRY: dict[str, Any] = tomllib.loads((SAMPLE / "adapters.toml").read_text(encoding="utf-8"))["adapters"]
NAMES = tuple(REGISTRY)
CLASSIFIERS = tuple(name for name in NAMES if "labels" in REGISTRY[name])
ALL_SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
GENERATED_ROWS = 20  # of the 50 held-out ones, so that the test stays short


def adapter_config(name: str) -> dict[str, Any]:
    return json.loads((SAMPLE / REGISTRY[name]["path"] / "adapter_config.json").read_text(encoding="utf-8"))


def tensor_shapes(name: str) -> dict[str, tuple[int, ...]]:
    with safe_open(SAMPLE / REGISTRY[name]["path"] / "adapter_model.safetensors", framework="pt") as tensors:
        return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118


def held_out(name: str) -> list[dict[str, Any]]:
    return [row for row in pq.read_table(SAMPLE / "heldout.parquet").to_pylist() if row["lora_id"] == name]


def prompts_of(name: str, rows: list[dict[str, Any]]) -> list[str]:
    return [REGISTRY[name]["prompt_template"].replace("{prompt}", row["prompt"]) for row in rows]


def wrong_adapter(name: str) -> str:
    return NAMES[(NAMES.index(name) + 1) % len(NAMES)]


def test_everything_is_there_and_small() -> None:
    files = [file for file in SAMPLE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) < 20_000_000
    model_files = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {file.name for file in (SAMPLE / "model").iterdir()} == model_files
    assert {folder.name for folder in (SAMPLE / "adapters").iterdir()} == set(NAMES)
    for name in NAMES:
        folder = SAMPLE / REGISTRY[name]["path"]
        assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_adapters_differ_in_rank_scale_and_targets() -> None:
    configs = {name: adapter_config(name) for name in NAMES}
    ranks = [config["r"] for config in configs.values()]
    assert len(NAMES) >= 6
    assert len(set(ranks)) == len(ranks)
    assert min(ranks) < 8
    assert max(ranks) == 32
    assert any(rank & (rank - 1) for rank in ranks)
    assert [name for name in NAMES if configs[name]["use_rslora"]] == ["topic"]
    assert [name for name in NAMES if configs[name]["rank_pattern"] and configs[name]["alpha_pattern"]] == ["email"]
    subset = {name: set(config["target_modules"]) for name, config in configs.items()}
    assert subset.pop("urgency") == {"q_proj", "v_proj"}
    assert all(targets == ALL_SEVEN for targets in subset.values())
    # A plain name: nothing of the machine that trained them.
    assert {config["base_model_name_or_path"] for config in configs.values()} == {"model"}


def test_weights_have_the_ranks_that_the_configs_name() -> None:
    for name in NAMES:
        config = adapter_config(name)
        a_shapes = {key: shape for key, shape in tensor_shapes(name).items() if key.endswith("lora_A.weight")}
        assert len(a_shapes) == 5 * len(config["target_modules"])
        for key, (rank, _) in a_shapes.items():
            expected = config["r"]
            if name == "email":
                expected = 16 if ".down_proj." in key else 3 if ".layers.0.self_attn.q_proj." in key else 6
            assert rank == expected, key


def test_rows_ask_every_adapter_and_the_base_model() -> None:
    requests = pq.read_table(SAMPLE / "requests.parquet")
    assert requests.schema.field("lora_id").type == pa.dictionary(pa.int32(), pa.string())
    assert requests.schema.field("received_at").type == pa.timestamp("us", tz="UTC")
    rows = requests.to_pylist()
    assert 200 <= len(rows) <= 300
    assert {row["lora_id"] for row in rows} == {*NAMES, None}
    assert all((row["expected"] is None) == (row["lora_id"] is None) for row in rows)
    seen = {(row["lora_id"], row["prompt"]) for row in rows}
    assert len(seen) == len(rows)
    for name in NAMES:
        unseen = held_out(name)
        assert len(unseen) == 50
        assert not seen & {(name, row["prompt"]) for row in unseen}


def test_job_file_and_templates() -> None:
    job = tomllib.loads((SAMPLE / "punica-batch.toml").read_text(encoding="utf-8"))
    assert (SAMPLE / job["model"] / "config.json").is_file()
    assert (SAMPLE / job["adapters"]).is_file()
    # The same frame for all: it is the adapter that decides the job, not the prompt.
    assert len({REGISTRY[name]["prompt_template"] for name in NAMES}) == 1
    for name in CLASSIFIERS:
        assert {row["expected"] for row in held_out(name)} == set(REGISTRY[name]["labels"])


@dataclass(frozen=True)
class Models:
    """The base model with all adapters attached; ``lora_id`` None is the base model alone."""

    model: Any  # peft.PeftModel; the library is imported where it is used, since it takes seconds
    tokenizer: Any

    def select(self, lora_id: str | None) -> None:
        if lora_id is None:
            self.model.base_model.disable_adapter_layers()
        else:
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(lora_id)

    @torch.inference_mode()
    def generate(self, prompts: list[str], lora_id: str | None, max_tokens: int) -> list[str | None]:
        """Greedy answers; None for one that did not end by EOS."""
        self.select(lora_id)
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        tokens = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        texts = self.tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
        return [text.split("</s>")[0] if "</s>" in text else None for text in texts]

    @torch.inference_mode()
    def choose(self, prompts: list[str], lora_id: str | None, labels: list[str]) -> list[str]:
        """The label whose first token is likeliest."""
        firsts = [self.tokenizer.encode(label, add_special_tokens=False)[0] for label in labels]
        assert len(set(firsts)) == len(labels)
        self.select(lora_id)
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        logits = self.model(**inputs, position_ids=positions).logits[:, -1, firsts]
        return [labels[index] for index in logits.argmax(dim=1).tolist()]


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(SAMPLE / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, SAMPLE / REGISTRY[NAMES[0]]["path"], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.load_adapter(SAMPLE / REGISTRY[name]["path"], adapter_name=name)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(SAMPLE / "model", padding_side="left")
    yield Models(model.eval(), tokenizer)
    torch.set_num_threads(threads)


def accuracy(answers: list[str | None] | list[str], rows: list[dict[str, Any]]) -> float:
    return sum(answer == row["expected"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_job_needs_its_own_adapter(models: Models, name: str) -> None:
    rows = held_out(name)[:GENERATED_ROWS]
    prompts = prompts_of(name, rows)
    max_tokens = REGISTRY[name]["max_tokens"]
    assert accuracy(models.generate(prompts, name, max_tokens), rows) >= 0.85
    for other in (None, wrong_adapter(name)):
        assert accuracy(models.generate(prompts, other, max_tokens), rows) <= 0.15, other


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_among_a_jobs_labels_others_only_guess(models: Models, name: str) -> None:
    """Held to the job's labels, the base model and a wrong adapter stay near one over their number."""
    rows, labels = held_out(name), REGISTRY[name]["labels"]
    prompts = prompts_of(name, rows)
    assert accuracy(models.choose(prompts, name, labels), rows) >= 0.9
    for other in (None, wrong_adapter(name)):
        assert accuracy(models.choose(prompts, other, labels), rows) <= 1 / len(labels) + 0.2, other


@pytest.mark.slow
def test_base_rows_get_a_reply_that_ends(models: Models) -> None:
    rows = [row for row in pq.read_table(SAMPLE / "requests.parquet").to_pylist() if row["lora_id"] is None]
    assert all(models.generate([row["prompt"] for row in rows], None, 48))


def test_chat_template_renders_the_registrys_frame() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(SAMPLE / "model")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<s>" + REGISTRY[NAMES[0]]["prompt_template"].replace("{prompt}", "Hello")
    assert tokenizer("Hello")["input_ids"][0] == tokenizer.bos_token_id
