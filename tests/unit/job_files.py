"""A small job on disk for tests that load no weights: a Llama-shaped config with a tokenizer, adapters, rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapter_files import HIDDEN, INTERMEDIATE, LAYERS, write_adapter
from text_helpers import BYTE_LEVEL_CONFIG, byte_level, save

from punica_batch import cli
from punica_batch.config_sources import load_config

CONTEXT = 64


def stay_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``folder`` the current one, and leaves no trace of the machine's own settings."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(folder / "cache"))
    for name in ("PUNICA_BATCH_MODEL", "PUNICA_BATCH_ADAPTERS"):
        monkeypatch.delenv(name, raising=False)


def write_model(folder: Path) -> Path:
    """The model that ``adapter_files.MODULES`` describes, but for the vocabulary. No weights."""
    tokenizer = byte_level()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HIDDEN // 2, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "max_position_embeddings": CONTEXT, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "tie_word_embeddings": True, "eos_token_id": tokenizer.token_to_id("<|end|>"),
    }  # fmt: skip
    return save(folder, tokenizer, BYTE_LEVEL_CONFIG, config=config)


def write_rows(path: Path, lora_ids: Sequence[str | None], prompts: Sequence[str | None] | None = None) -> Path:
    columns: dict[str, Any] = {
        "prompt": pa.array(prompts or [f"row {i}: hello" for i in range(len(lora_ids))], pa.string()),
        "lora_id": pa.array(lora_ids, pa.string()),
    }
    pq.write_table(pa.table(columns), path)
    return path


def write_job(folder: Path) -> Path:
    """model/, adapters/{good, wide, wrong, bad}, rows.parquet (100 rows, 4 of them with a faulty adapter), and a job
    file. ``wrong`` has a field that is refused, ``bad`` shapes that do not fit; nobody names ``bad``."""
    write_model(folder / "model")
    write_adapter(folder / "adapters" / "good", r=2)
    write_adapter(folder / "adapters" / "wide", r=4)
    write_adapter(folder / "adapters" / "wrong", use_dora=True)
    write_adapter(folder / "adapters" / "bad", r=3)
    (folder / "adapters" / "bad" / "adapter_config.json").write_bytes(
        (folder / "adapters" / "good" / "adapter_config.json").read_bytes()
    )
    lora_ids = ["good"] * 60 + ["wide"] * 20 + [None] * 10 + [""] * 6 + ["wrong"] * 3 + ["nobody"]
    prompts: list[str | None] = [f"row {i}: hello" for i in range(100)]
    prompts[0], prompts[7], prompts[99] = "hello there", None, "unknown"
    (folder / "punica-batch.toml").write_text('model = "model"\nadapters = "adapters"\nmax_tokens = 8\n')
    return write_rows(folder / "rows.parquet", lora_ids, prompts)


def config_of(job: Path, **flags: Any) -> Any:
    return load_config([str(job)], {"device": "cpu", **flags}, environ={})


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert cli.execute([*arguments, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def write_both(job: Path) -> Path:
    """Twenty rows with a prompt and messages."""
    talk = pa.array(
        [[{"role": "user", "content": "hi"}]] * 20, pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    )
    table = pa.table({"prompt": ["said"] * 20, "messages": talk, "lora_id": ["good"] * 20})
    pq.write_table(table, job.parent / "both.parquet")
    return job.parent / "both.parquet"
