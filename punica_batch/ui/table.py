"""The first rows of an output as a table: who answered what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import fsspec
import pyarrow.parquet as pq
from rich.table import Table
from rich.text import Text

from punica_batch.config import JobConfig
from punica_batch.types import JsonDict


def output_table(output: str, config: JobConfig, limit: int) -> Table:
    """The first ``limit`` rows of a finished output: adapter, prompt, answer or error. Cells are cut to the
    terminal's width by rich; off a terminal they are whole, line breaks shown as ``⏎``."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("adapter", no_wrap=True, style="cyan")
    # These two give way where it is narrow; their cells say themselves that they are cut, not wrapped.
    table.add_column("prompt")
    table.add_column("answer")
    for row in islice(_rows(output, config, limit), limit):
        table.add_row(*_cells(row, config))
    return table


def _rows(output: str, config: JobConfig, limit: int) -> Iterator[JsonDict]:
    filesystem, path = fsspec.core.url_to_fs(output, **config.storage_options)
    if path.endswith((".jsonl", ".ndjson")):
        with filesystem.open(path, "r", encoding="utf-8") as lines:
            yield from (_openai_row(json.loads(line), config) for line in lines)
        return
    parts = sorted(filesystem.glob(f"{path}/part-*.parquet")) if filesystem.isdir(path) else [path]
    for part in parts:
        with filesystem.open(part, "rb") as file:
            parquet = pq.ParquetFile(file)
            wanted = [name for name in _columns(config) if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(batch_size=min(limit, 1024), columns=wanted):
                yield from batch.to_pylist()


def _columns(config: JobConfig) -> list[str]:
    prefix = config.output_prefix
    carried = [config.lora_column, config.prompt_column, config.messages_column]
    return [*carried, f"{prefix}generation", f"{prefix}error"]


def _openai_row(line: JsonDict, config: JobConfig) -> JsonDict:
    body = (line.get("response") or {}).get("body") or {}
    choices = body.get("choices", [])
    answers = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    error = (line.get("error") or {}).get("message")
    return {
        config.lora_column: body.get("model"),
        config.prompt_column: line.get("custom_id"),
        f"{config.output_prefix}generation": answers,
        f"{config.output_prefix}error": error,
    }


def _cells(row: JsonDict, config: JobConfig) -> tuple[Text, Text, Text]:
    prompt = row.get(config.prompt_column)
    if prompt is None and (messages := row.get(config.messages_column)):
        prompt = messages[-1].get("content")
    error = row.get(f"{config.output_prefix}error")
    answer = row.get(f"{config.output_prefix}generation") if error is None else error
    name = Text(_one_line(row.get(config.lora_column) or "(base)"))
    return name, _cut(prompt), _cut(answer, "green" if error is None else "red")


def _cut(value: Any, style: str = "") -> Text:
    return Text(_one_line(value), style=style, no_wrap=True, overflow="ellipsis")


def _one_line(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " | ".join(_one_line(item) for item in value)
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    # Control characters of an answer must not reach the terminal.
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in text.strip())
