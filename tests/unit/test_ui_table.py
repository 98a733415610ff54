"""The first rows of an output as a table, whatever the output is."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from rich.console import Console

from punica_batch.config import JobConfig
from punica_batch.ui.console import render
from punica_batch.ui.table import OutputTable

ROWS = [
    {"lora_id": "topic", "prompt": "one\ntwo", "generation": "billing", "error": None},
    {"lora_id": None, "prompt": "[b]x[/b]\x1b[31m", "generation": "a\tb\x07", "error": None},
    {"lora_id": "nobody", "prompt": None, "generation": None, "error": "unknown_adapter: there is none"},
]
SCHEMA = pa.schema([(name, pa.large_string()) for name in ROWS[0]])


def shown(output: Path, config: JobConfig | None = None, limit: int = 10) -> str:
    return render(OutputTable(str(output), config or JobConfig(), limit))


def test_a_parquet_file(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS, schema=SCHEMA), tmp_path / "x.parquet")
    text = shown(tmp_path / "x.parquet")
    header, *rows = text.splitlines()
    assert header.split() == ["adapter", "prompt", "answer"]
    assert rows[0].split() == ["topic", "one⏎two", "billing"]
    assert rows[1].split() == ["(base)", "[b]x[/b]", "[31m", "a", "b"], "no markup, no control characters"
    assert "\x1b" not in text
    assert rows[2].split(maxsplit=1) == ["nobody", "✗ unknown_adapter: there is none"]
    assert len(shown(tmp_path / "x.parquet", limit=2).splitlines()) == 3


def test_a_dataset_with_prefix_and_own_columns(tmp_path: Path) -> None:
    names = {"lora_id": "task", "prompt": "text", "generation": "my_generation", "error": "my_error"}
    (tmp_path / "x").mkdir()
    for i, row in enumerate(ROWS):
        table = pa.Table.from_pylist([row], schema=SCHEMA).rename_columns([names[name] for name in SCHEMA.names])
        pq.write_table(table, tmp_path / "x" / f"part-{i:05}.parquet")
    (tmp_path / "x" / "_SUCCESS").write_text("{}")
    config = JobConfig(lora_column="task", prompt_column="text", output_prefix="my_")
    rows = shown(tmp_path / "x", config, limit=3).splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["topic", "(base)", "nobody"]


def test_several_samples_and_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    row = {"lora_id": "topic", "messages": messages, "generation": ["a", None, "c"], "error": None}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    header, *rows = shown(tmp_path / "x.parquet").splitlines()
    assert rows[0].split(maxsplit=2) == ["topic", "hello", "1: a"]
    assert [row.strip() for row in rows[1:]] == ["2:", "3: c"]
    assert {row.index(number) for row, number in zip(rows, ("1:", "2:", "3:"), strict=True)} == {header.index("answer")}


def test_one_of_several_samples_has_no_number(tmp_path: Path) -> None:
    row = {"lora_id": "topic", "prompt": "hello", "generation": ["a"], "error": None}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    assert shown(tmp_path / "x.parquet").splitlines()[1].split() == ["topic", "hello", "a"]


def test_without_a_prompt_the_id_stands_there_or_the_rows_number(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS, schema=SCHEMA).append_column("key", pa.array([70, 71, 72]))
    pq.write_table(table.select(["key", "lora_id", "generation", "error"]), tmp_path / "x.parquet")
    header, first, *_ = shown(tmp_path / "x.parquet", JobConfig(id_column="key")).splitlines()
    assert (header.split(), first.split()) == (["adapter", "key", "answer"], ["topic", "70", "billing"])
    pq.write_table(table.select(["generation", "error"]), tmp_path / "x.parquet")
    header, first, second, _ = shown(tmp_path / "x.parquet").splitlines()
    assert header.split() == ["row", "answer"], "and no adapter is named where the output does not say it"
    assert (first.split(), second.split()) == (["0", "billing"], ["1", "a", "b"])


def test_an_output_without_rows(tmp_path: Path) -> None:
    pq.write_table(SCHEMA.empty_table(), tmp_path / "x.parquet")
    assert shown(tmp_path / "x.parquet").splitlines()[0].split() == ["row", "answer"]


def test_off_a_terminal_rows_keep_to_100_columns(tmp_path: Path) -> None:
    long = {"lora_id": "topic", "prompt": "word " * 200, "generation": "answer " * 100, "error": None}
    pq.write_table(pa.Table.from_pylist([long] * 3, schema=SCHEMA), tmp_path / "x.parquet")
    printed = shown(tmp_path / "x.parquet").splitlines()
    assert len(printed) == 4
    assert all(90 < len(line) <= 100 for line in printed[1:])
    assert all(line.count("…") == 2 for line in printed[1:])


def test_what_parts_at_the_end_shows_although_cells_are_cut(tmp_path: Path) -> None:
    row = {"lora_id": "redact", "prompt": f"{'字 ' * 60}at <a@b.example>", "generation": f"{'字 ' * 60}at [EMAIL]"}
    pq.write_table(pa.Table.from_pylist([{**row, "error": None}], schema=SCHEMA), tmp_path / "x.parquet")
    line = shown(tmp_path / "x.parquet").splitlines()[1]
    assert cell_len(line) <= 100
    assert line.index("字") < line.index("…") < line.index("<a@b.example>") < line.index("[EMAIL]")


def test_openai_lines(tmp_path: Path) -> None:
    body = {"model": "topic", "choices": [{"message": {"role": "assistant", "content": "billing"}}]}
    good = {"custom_id": "a", "response": {"status_code": 200, "body": body}, "error": None}
    bad = {"custom_id": "b", "response": None, "error": {"code": "bad_messages", "message": "no content"}}
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    header, *rows = shown(tmp_path / "x.jsonl").splitlines()
    assert header.split() == ["adapter", "custom_id", "answer"]
    assert rows[0].split() == ["topic", "a", "billing"]
    assert "no content" in rows[1]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_on_a_terminal_rows_keep_to_one_line(tmp_path: Path, width: int) -> None:
    long = {"lora_id": "topic", "prompt": "word " * 200, "generation": "answer " * 100, "error": None}
    pq.write_table(pa.Table.from_pylist([long] * 3, schema=SCHEMA), tmp_path / "x.parquet")
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(OutputTable(str(tmp_path / "x.parquet"), JobConfig(), 3))
    printed = capture.get().splitlines()
    assert len(printed) == 4
    assert all(len(line) <= width for line in printed)
    assert all("topic" in line and "answer" in line for line in printed[1:])
