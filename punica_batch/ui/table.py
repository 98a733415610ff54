"""The first rows of an output as a table: who answered what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import fsspec
import pyarrow.parquet as pq
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from punica_batch.config import JobConfig
from punica_batch.types import JsonDict

LOG_WIDTH = 100  # off a terminal
_WIDEST = 2000  # characters that a line's head or tail can have room for: measuring megabytes takes seconds
_ROW = " row"  # the row's number among the columns; no input column is likely to have that name


class OutputTable:
    """The first ``limit`` rows of a finished output: adapter, prompt, answer or error. Where the output carries no
    prompt, the row's id stands there, or its number. Cells lose their middle where the terminal, elsewhere a table of
    100 columns, has no room for them; line breaks are shown as ``⏎``."""

    def __init__(self, output: str, config: JobConfig, limit: int) -> None:
        self._config = config
        self._rows = list(islice(_rows(output, config, limit), limit))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self._table(), options if console.is_terminal else options.update(width=LOG_WIDTH))

    def _table(self) -> Table:
        config = self._config
        carried = self._rows[0].keys() if self._rows else ()
        named = config.lora_column in carried
        asked = config.prompt_column in carried or config.messages_column in carried
        other = next((name for name in ("custom_id", config.id_column, _ROW) if name in carried), _ROW)
        table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
        if named:
            table.add_column("adapter", no_wrap=True, style="cyan")
        # These two give way where it is narrow; their cells say themselves that they are cut, not wrapped.
        table.add_column("prompt" if asked else other.strip())
        table.add_column("answer")
        for row in self._rows:
            first = _prompt(row, config) if asked else row.get(other)
            cells = [_Cut(_one_line(first)), _answer(row, config)]
            table.add_row(*([Text(_one_line(row[config.lora_column] or "(base)")), *cells] if named else cells))
        return table


def _rows(output: str, config: JobConfig, limit: int) -> Iterator[JsonDict]:
    filesystem, path = fsspec.core.url_to_fs(output, **config.storage_options)
    if path.endswith((".jsonl", ".ndjson")):
        with filesystem.open(path, "r", encoding="utf-8") as lines:
            yield from (_openai_row(json.loads(line), config) for line in lines)
        return
    parts = sorted(filesystem.glob(f"{path}/part-*.parquet")) if filesystem.isdir(path) else [path]
    number = 0
    for part in parts:
        with filesystem.open(part, "rb") as file:
            parquet = pq.ParquetFile(file)
            wanted = [name for name in _columns(config) if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(batch_size=min(limit, 1024), columns=wanted):
                for row in batch.to_pylist():
                    yield {**row, _ROW: number}
                    number += 1


def _columns(config: JobConfig) -> list[str]:
    prefix = config.output_prefix
    carried = [config.lora_column, config.prompt_column, config.messages_column, config.id_column]
    return [*carried, f"{prefix}generation", f"{prefix}error"]


def _openai_row(line: JsonDict, config: JobConfig) -> JsonDict:
    body = (line.get("response") or {}).get("body") or {}
    choices = body.get("choices", [])
    answers = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    error = (line.get("error") or {}).get("message")
    return {
        config.lora_column: body.get("model"),
        "custom_id": line.get("custom_id"),
        f"{config.output_prefix}generation": answers,
        f"{config.output_prefix}error": error,
    }


def _prompt(row: JsonDict, config: JobConfig) -> Any:
    prompt = row.get(config.prompt_column)
    if prompt is None and (messages := row.get(config.messages_column)):
        return messages[-1].get("content")
    return prompt


def _answer(row: JsonDict, config: JobConfig) -> _Cut:
    """One line, or one for each of several answers."""
    error = row.get(f"{config.output_prefix}error")
    if error is not None:
        return _Cut(f"✗ {_one_line(error)}", "red")
    answer = row.get(f"{config.output_prefix}generation")
    if not isinstance(answer, list):
        return _Cut(_one_line(answer), "green")
    if len(answer) == 1:
        return _Cut(_one_line(answer[0]), "green")
    return _Cut("\n".join(f"{i}: {_one_line(each)}" for i, each in enumerate(answer, 1)), "green")


class _Cut:
    """Lines that lose their middle where they are too long: prompts and answers often part at the end alone."""

    def __init__(self, text: str, style: str = "") -> None:
        self._lines = [
            line if len(line) <= 2 * _WIDEST else line[:_WIDEST] + line[-_WIDEST:] for line in text.split("\n")
        ]
        self._style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max(map(cell_len, self._lines))
        return Measurement(min(widest, 1), widest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield Text(_within(line, options.max_width), style=self._style, no_wrap=True, overflow="crop")


def _within(line: str, width: int) -> str:
    if cell_len(line) <= width:
        return line
    tail = width // 3
    end = set_cell_size(line[::-1], tail)[::-1].lstrip()
    return f"{set_cell_size(line, width - 1 - cell_len(end)).rstrip()}…{end}"


def _one_line(value: Any) -> str:
    if value is None:
        return ""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    # Control characters of an answer must not reach the terminal.
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in text.strip())
