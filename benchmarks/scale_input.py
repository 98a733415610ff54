"""What a job of millions of rows needs, made quickly: a tiny random Llama, tiny adapters, and Parquet files of rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import save_file

TOKENIZER = Path(__file__).parent.parent / "sample_data" / "model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_RANK = 2
_CHUNK_ROWS = 100_000
_WORDS = ("order", "late", "refund", "please", "the parcel", "was", "broken", "thanks", "invoice", "where is", "again")

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("lora_id", pa.string()),
        ("max_tokens", pa.int32()),
        ("customer", pa.string()),
        ("amount", pa.decimal128(21, 2)),
        ("at", pa.timestamp("ms", "UTC")),
        ("note", pa.string()),
    ]
)


def make_model(folder: Path, *, hidden: int = 16, seed: int = 0) -> None:
    """A Llama of one layer with random weights and the sample's tokenizer."""
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    config = json.loads((TOKENIZER / "config.json").read_text())
    config |= {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": hidden // 2, "max_position_embeddings": 128, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        **{f"{layer}self_attn.{name}_proj.weight": (rows, hidden) for name, rows in _projections(hidden).items()},
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}mlp.gate_proj.weight": (2 * hidden, hidden),
        f"{layer}mlp.up_proj.weight": (2 * hidden, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, 2 * hidden),
    }
    weights = {name: _random(rng, *shape) for name, shape in shapes.items()}
    norms = (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm")
    weights |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors")


def make_adapters(folder: Path, count: int, *, hidden: int = 16, seed: int = 1) -> list[str]:
    """``count`` PEFT folders ``adapter-000…`` of rank 2 on q and v; answers their names."""
    rng = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    names = [f"adapter-{i:03}" for i in range(count)]
    rows = _projections(hidden)
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        weights = {}
        for projection in ("q", "v"):
            prefix = f"base_model.model.model.layers.0.self_attn.{projection}_proj"
            weights[f"{prefix}.lora_A.weight"] = _random(rng, _RANK, hidden)
            weights[f"{prefix}.lora_B.weight"] = _random(rng, rows[projection], _RANK)
        save_file(weights, folder / name / "adapter_model.safetensors")
    return names


def write_rows(
    path: Path, count: int, names: list[str], *, max_tokens: int, row_group_rows: int | None, seed: int = 2
) -> None:
    """``count`` rows, each of one of ``names`` (empty: the base model) and of 1 to ``max_tokens`` new tokens, both at
    random. ``row_group_rows`` None: all in one row group, still written piece by piece."""
    rng = np.random.default_rng(seed)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for chunk in _chunks(count, names, max_tokens, rng, min(row_group_rows or count, _CHUNK_ROWS)):
            if row_group_rows is None:
                for batch in chunk.to_batches():
                    writer.write_batch(batch, row_group_size=count)
            else:
                writer.write_table(chunk, row_group_size=row_group_rows)


def _chunks(
    count: int, names: list[str], max_tokens: int, rng: np.random.Generator, chunk_rows: int
) -> Iterator[pa.Table]:
    words = pa.array(_WORDS)
    for start in range(0, count, chunk_rows):
        rows = min(chunk_rows, count - start)
        numbers = pa.array(np.arange(start, start + rows)).cast(pa.string())
        text = pc.binary_join_element_wise(*(words.take(_pick(rng, len(words), rows)) for _ in range(3)), numbers, " ")
        lora = pa.array(names).take(_pick(rng, len(names), rows)) if names else pa.nulls(rows, pa.string())
        columns = {
            "id": pc.binary_join_element_wise("row", numbers, "-"),
            "prompt": text,
            "lora_id": lora,
            "max_tokens": pa.array(rng.integers(1, max_tokens + 1, rows), pa.int32()),
            "customer": pa.array(rng.integers(0, 10**9, rows)).cast(pa.string()),
            "amount": pa.array(rng.integers(0, 10**6, rows)).cast(pa.decimal128(21, 2)),
            "at": pa.array(rng.integers(1.6e12, 1.7e12, rows), pa.timestamp("ms", "UTC")),
            "note": pc.binary_join_element_wise(
                *(words.take(_pick(rng, len(words), rows)) for _ in range(8)), text, " "
            ),
        }
        yield pa.table(columns, schema=SCHEMA)


def _pick(rng: np.random.Generator, choices: int, rows: int) -> NDArray[np.int64]:
    return rng.integers(0, choices, rows)


def _projections(hidden: int) -> dict[str, int]:
    return {"q": hidden, "k": hidden // 2, "v": hidden // 2}


def _random(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.normal(0, 0.1, shape).astype(np.float32)
