from __future__ import annotations

import datetime
import decimal
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punica_batch.config import JobConfig
from punica_batch.data import cursor as cursor_module
from punica_batch.data.columns import ERROR_COLUMN
from punica_batch.data.source import Source
from punica_batch.errors import InputError, JobError, UsageError


def write(table: pa.Table, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, write_page_checksum=True, **options)
    return path


def numbered(start: int, stop: int) -> pa.Table:
    prompts = pa.array([f"p{i}" for i in range(start, stop)], pa.string())
    return pa.table({"prompt": prompts, "k": pa.array(range(start, stop), pa.int64())})


def read_all(source: Source, *columns: str) -> list[Any]:
    batches = source.batches(0, source.num_rows, list(columns) or None)
    return [row for batch in batches for row in batch.to_pylist()]


def test_files_folders_and_globs_have_a_fixed_order(tmp_path: Path) -> None:
    for name, start in [("b/2.parquet", 30), ("b/10.parquet", 20), ("a.parquet", 0), ("c/x.pq", 40)]:
        write(numbered(start, start + 10), tmp_path / name)
    for name in (
        ".hidden.parquet",
        "_tmp.parquet",
        "_punica/p.parquet",
        "z.parquet.punica/parts/q.parquet",
        "b/.x/y.parquet",
    ):
        write(numbered(900, 901), tmp_path / name)
    (tmp_path / "README.md").write_text("not data")
    folder = Source.open(JobConfig(inputs=(str(tmp_path),), output="o/"))
    assert [row["k"] for row in read_all(folder)] == [*range(10), *range(20, 40), *range(40, 50)]
    assert folder.num_rows == 40
    glob = Source.open(JobConfig(inputs=(f"{tmp_path}/*/*.p*q*",), output="o/"))
    assert [row["k"] for row in read_all(glob)] == [*range(20, 50)]
    several = Source.open(JobConfig(inputs=(f"{tmp_path}/c/x.pq", f"file://{tmp_path}/a.parquet"), output="o/"))
    assert [row["k"] for row in read_all(several)] == [*range(40, 50), *range(10)]
    limited = Source.open(JobConfig(inputs=(str(tmp_path),), limit=13))
    assert [row["k"] for row in read_all(limited)] == [*range(10), 20, 21, 22]
    assert [file.rows for file in limited.files] == [10] * 4


def test_the_jobs_own_output_is_not_its_input(tmp_path: Path) -> None:
    write(numbered(0, 5), tmp_path / "in.parquet")
    write(numbered(5, 9), tmp_path / "out.parquet")
    write(numbered(5, 9), tmp_path / "o" / "part-00000.parquet")
    assert Source.open(JobConfig(inputs=(f"{tmp_path}/*.parquet",), output=f"{tmp_path}/out.parquet")).num_rows == 5
    whole = Source.open(JobConfig(inputs=(str(tmp_path),), output=f"{tmp_path}/o/"))
    assert [Path(file.path).name for file in whole.files] == ["in.parquet", "out.parquet"]
    with pytest.raises(UsageError, match="is the input"):
        Source.open(JobConfig(inputs=(f"{tmp_path}/in.parquet",), output=f"{tmp_path}/in.parquet"))


def test_outputs_of_other_jobs_are_no_input(tmp_path: Path) -> None:
    write(numbered(0, 5), tmp_path / "d" / "in.parquet")
    for name in ("x.parquet", "y/part-00000.parquet", "z/x.pq"):
        write(numbered(5, 9), tmp_path / "d" / name)
    for state in ("x.parquet.punica", "y/_punica", "z/x.pq.punica"):
        (tmp_path / "d" / state).mkdir()
        (tmp_path / "d" / state / "plan.json").write_text("{}")
    folder = JobConfig(inputs=(f"{tmp_path}/d",), output=f"{tmp_path}/o/")
    assert [Path(file.path).name for file in Source.open(folder).files] == ["in.parquet"]
    named = JobConfig(inputs=(f"{tmp_path}/d/y", f"{tmp_path}/d/x.parquet"), output=f"{tmp_path}/o/")
    assert Source.open(named).num_rows == 8


def test_the_jobs_own_output_is_known_behind_a_link(tmp_path: Path) -> None:
    write(numbered(0, 5), tmp_path / "d" / "in.parquet")
    write(numbered(5, 9), tmp_path / "d" / "o.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    config = JobConfig(inputs=(f"{tmp_path}/d",), output=f"{tmp_path}/link/o.parquet")
    assert [Path(file.path).name for file in Source.open(config).files] == ["in.parquet"]
    with pytest.raises(UsageError, match="is the input"):
        Source.open(config.model_copy(update={"inputs": (f"{tmp_path}/d/o.parquet",)}))


def test_hive_partitions_become_columns(tmp_path: Path) -> None:
    parts = [("lang=de/year=2024", 0), ("lang=en/year=2023", 3), ("lang=__HIVE_DEFAULT_PARTITION__/year=7", 6)]
    for name, start in parts:
        write(numbered(start, start + 3), tmp_path / "d" / name / "x.parquet")
    write(numbered(0, 2), tmp_path / "e" / "lora_id=spam%20ham" / "x.parquet")
    source = Source.open(JobConfig(inputs=(str(tmp_path / "d"),), output="o/"))
    assert source.schema.field("lang").type == pa.string()
    assert source.schema.field("year").type == pa.int64()
    order = [(None, 7)] * 3 + [("de", 2024)] * 3 + [("en", 2023)] * 3
    assert [(row["lang"], row["year"]) for row in read_all(source)] == order
    assert [row for batch in source.batches(2, 5, ["year"]) for row in batch.to_pylist()] == [
        {"year": 7},
        {"year": 2024},
        {"year": 2024},
    ]
    shell = Source.open(JobConfig(inputs=(f"{tmp_path}/d/lang=de/year=2024/x.parquet",)))
    assert {(row["lang"], row["year"]) for row in read_all(shell)} == {("de", 2024)}
    adapter = Source.open(JobConfig(inputs=(str(tmp_path / "e"),)))
    assert "lora_id" in adapter.work_columns
    assert [row["lora_id"] for b in adapter.work_batches(0, 2) for row in b.to_pylist()] == ["spam ham"] * 2
    write(numbered(0, 2), tmp_path / "d" / "stray.parquet")
    with pytest.raises(InputError, match=r"stray\.parquet: not all files are in a folder"):
        Source.open(JobConfig(inputs=(str(tmp_path / "d"),)))


def test_memory_store() -> None:
    store = fsspec.filesystem("memory")
    for number in range(2):
        with store.open(f"/bucket/in/{number}.parquet", "wb") as file:
            pq.write_table(numbered(number * 10, number * 10 + 10), file)
    source = Source.open(JobConfig(inputs=("memory://bucket/in",), output="o/", storage_options={"token": "secret"}))
    assert [row["k"] for row in read_all(source)] == list(range(20))
    assert source.files[0].path == "memory://bucket/in/0.parquet"
    assert source.files[0].mtime is not None
    assert "secret" not in repr(source.files)


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    first = write(numbered(0, 3), tmp_path / "a.parquet")
    write(numbered(3, 6).select(["k", "prompt"]), tmp_path / "b.parquet")
    config = JobConfig(inputs=(str(tmp_path),), output="o/")
    source = Source.open(config)
    assert source.schema.names == ["prompt", "k"]
    assert [row["k"] for row in read_all(source)] == list(range(6))
    write(numbered(0, 1).select(["prompt"]), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=rf"{tmp_path}/c\.parquet has no column 'k', which {first} has"):
        Source.open(config)
    assert Source.open(config.model_copy(update={"columns": ("prompt",)})).num_rows == 7
    write(numbered(0, 1).append_column("z", pa.array([1])), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=rf"{first} has no column 'z', which {tmp_path}/c\.parquet has"):
        Source.open(config)
    write(pa.table({"prompt": ["x"], "k": ["1"]}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c\.parquet: column 'k' is string, but int64 in"):
        Source.open(config)


def test_nullability_is_the_weakest_of_the_files(tmp_path: Path) -> None:
    strict = pa.schema([pa.field("prompt", pa.string(), nullable=False), pa.field("k", pa.int64(), nullable=False)])
    write(numbered(0, 3).cast(strict), tmp_path / "a.parquet")
    config = JobConfig(inputs=(str(tmp_path),), output="o/")
    assert not Source.open(config).schema.field("k").nullable
    write(numbered(0, 3), tmp_path / "b.parquet")
    source = Source.open(config)
    assert source.schema.field("k").nullable
    assert len(read_all(source)) == 6


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (pa.table({"text": ["a"]}), {}, r"no column 'prompt' or 'messages', only text"),
        (pa.table({"prompt": [1]}), {}, "column 'prompt' must be a string, not int64"),
        (pa.table({"prompt": pa.nulls(1)}), {}, "column 'prompt' must be a string, not null"),
        (pa.table({"prompt": ["a"], "lora_id": [1]}), {}, "column 'lora_id' must be a string, not int64"),
        (pa.table({"prompt": ["a"], "max_tokens": [1.5]}), {}, "column 'max_tokens' must be an integer, not double"),
        (pa.table({"prompt": ["a"], "max_tokens": [True]}), {}, "column 'max_tokens' must be an integer, not bool"),
        (pa.table({"prompt": ["a"], "temperature": ["hot"]}), {}, "column 'temperature' must be a number, not string"),
        (pa.table({"prompt": ["a"], "stop": [[1]]}), {}, "column 'stop' must be a string or a list of strings"),
        (pa.table({"messages": ["a"]}), {}, "column 'messages' must be a list of {role, content}, not string"),
        (pa.table({"messages": [[{"role": "user"}]]}), {}, "column 'messages' must be a list"),
        (pa.table({"prompt": ["a"], "messages": [[{"role": "u", "content": "c"}]]}), {}, "has both 'prompt' and 'mess"),
        (pa.table({"prompt": ["a"]}), {"lora_column": "adapter"}, "no column 'adapter', only prompt: correct --lora-"),
        (pa.table({"prompt": ["a"]}), {"messages_column": "chat"}, "no column 'chat', only prompt: correct --mes"),
        (pa.table({"prompt": ["a"]}), {"id_column": "key"}, "no column 'key', only prompt: correct --id-column"),
        (pa.table({"prompt": ["a"]}), {"columns": ("prompt", "nope")}, "no column 'nope'"),
    ],
)  # fmt: skip
def test_wrong_columns_are_refused_by_name(
    tmp_path: Path, table: pa.Table, options: dict[str, Any], message: str
) -> None:
    path = write(table, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=message) as caught:
        Source.open(JobConfig(inputs=(str(path),), **options))
    assert str(path) in str(caught.value) or "columns" in options
    assert caught.value.exit_code == 4


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 this is not one PAR1")
    with pytest.raises(InputError, match=r"bad\.parquet is not a readable Parquet file"):
        Source.open(JobConfig(inputs=(str(bad),)))
    whole = write(numbered(0, 100), tmp_path / "whole.parquet").read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"bad\.parquet is not a readable Parquet file"):
        Source.open(JobConfig(inputs=(str(bad),)))
    with pytest.raises(InputError, match="no such file"):
        Source.open(JobConfig(inputs=(str(tmp_path / "none.parquet"),)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no Parquet or JSON lines files in"):
        Source.open(JobConfig(inputs=(str(tmp_path / "empty"),)))
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    write(twice, tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="two columns named 'prompt'"):
        Source.open(JobConfig(inputs=(str(tmp_path / "twice.parquet"),)))


def test_a_damaged_page_names_file_and_row_group(tmp_path: Path) -> None:
    path = write(
        numbered(0, 400), tmp_path / "in.parquet", row_group_size=100, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[content.index(b"p250")] ^= 1
    path.write_bytes(content)
    source = Source.open(JobConfig(inputs=(str(path),)))
    assert sum(batch.num_rows for batch in source.batches(0, 200)) == 200
    with pytest.raises(JobError, match=r"in\.parquet: row group 2 cannot be decoded \(.*CRC"):
        list(source.batches(200, 400))
    assert sum(batch.num_rows for batch in source.batches(300, 400)) == 100


def text_arrays(values: list[str | None]) -> dict[str, pa.Array]:
    raw = [None if value is None else value.encode() for value in values]
    arrays = {
        "string": pa.array(values, pa.string()),
        "large_string": pa.array(values, pa.large_string()),
        "dictionary": pa.array(values).dictionary_encode(),
        "binary": pa.array(raw, pa.binary()),
        "large_binary": pa.array(raw, pa.large_binary()),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(values, pa.string()))
        if hasattr(pa, "json_")
        else pa.array(values),
    }
    if hasattr(pa, "string_view"):
        arrays["string_view"] = pa.array(values, pa.string_view())
    return arrays


@pytest.mark.parametrize("kind", list(text_arrays([])))
def test_prompts_of_any_text_type(tmp_path: Path, kind: str) -> None:
    values = ["plain", None, "", "한국어 😀", "plain"] * 30
    table = pa.table({"prompt": text_arrays(values)[kind], "lora_id": pa.nulls(150)})
    try:
        path = write(table, tmp_path / "in.parquet", row_group_size=40)
    except pa.ArrowNotImplementedError:
        pytest.skip("this pyarrow writes no string views, so no file holds any")
    source = Source.open(JobConfig(inputs=(str(path),)))
    work = pa.Table.from_batches(source.work_batches(0, 150))
    assert work.schema == source.work_schema
    assert work["prompt"].type == pa.large_string()
    assert work["prompt"].to_pylist() == values
    assert work[ERROR_COLUMN].null_count == 150
    assert work["lora_id"].null_count == 150


@pytest.mark.parametrize("kind", ["string", "binary", "dictionary"])
def test_invalid_utf8_is_that_rows_error_and_is_carried(tmp_path: Path, kind: str) -> None:
    raw = pa.array([b"good", b"bad \xff\xfe", None, b"cut \xe2\x82"])
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    prompts = {"string": text, "binary": raw, "dictionary": text.dictionary_encode()}[kind]
    tags = pa.array([[b"\xff"], [b"ok"], None, []], pa.list_(pa.binary())).cast(pa.list_(pa.binary()))
    path = write(pa.table({"prompt": prompts, "note": text, "tags": tags}), tmp_path / "in.parquet")
    source = Source.open(JobConfig(inputs=(str(path),)))
    work = pa.Table.from_batches(source.work_batches(0, 4)).to_pylist()
    assert [row["prompt"] for row in work] == ["good", None, None, None]
    error = "invalid_utf8: column 'prompt' is not valid UTF-8."
    assert [row[ERROR_COLUMN] for row in work] == [None, error, None, error]
    carried = pa.Table.from_batches(source.batches(0, 4))
    assert carried["note"].cast(pa.binary()).to_pylist() == raw.to_pylist()


def test_options_have_one_type_each(tmp_path: Path) -> None:
    table = pa.table(
        {
            "messages": [[{"role": "user", "content": "hi"}], None],
            "max_tokens": pa.array([5, None], pa.int8()),
            "temperature": pa.array([1, None], pa.uint16()),
            "top_p": pa.array([0.5, None], pa.float32()),
            "seed": pa.array([2**64 - 1, None], pa.uint64()),
            "stop": pa.array(["END", None]),
            "n": pa.array([2, 3]),
            "min_p": pa.nulls(2),
            "lora_id": pa.array(["x", ""]).dictionary_encode(),
        }
    )
    source = Source.open(JobConfig(inputs=(str(write(table, tmp_path / "in.parquet")),)))
    assert source.is_messages
    assert source.lists
    first, second = pa.Table.from_batches(source.work_batches(0, 2)).to_pylist()
    assert first == {
        "messages": [{"role": "user", "content": "hi"}], "lora_id": "x", "max_tokens": 5, "temperature": 1.0,
        "top_p": 0.5, "min_p": None, "seed": 2**64 - 1, "stop": ["END"], "n": 2, ERROR_COLUMN: None,
    }  # fmt: skip
    assert second["stop"] is None
    assert second["lora_id"] == ""
    many = pa.table({"prompt": ["a", "b"], "stop": pa.array([["x", "y"], []], pa.large_list(pa.large_string()))})
    source = Source.open(JobConfig(inputs=(str(write(many, tmp_path / "many.parquet")),)))
    assert [row["stop"] for b in source.work_batches(0, 2) for row in b.to_pylist()] == [["x", "y"], []]


def test_template_columns_are_work_columns(tmp_path: Path) -> None:
    table = pa.table({"title": ["t"], "body": pa.array([b"b"]), "other": [1], "score": [3]})
    path = str(write(table, tmp_path / "in.parquet"))
    source = Source.open(JobConfig(inputs=(path,), prompt_template="T: {title} {body}"), ["{score}"])
    assert set(source.work_columns) == {"title", "body", "score"}
    (batch,) = source.work_batches(0, 1)
    assert batch.to_pylist() == [{"title": "t", "body": "b", "score": 3, ERROR_COLUMN: None}]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 400), st.integers(1, 3000)), max_size=6),
)
def test_any_range_equals_the_table(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[int, int]], ranges: list[tuple[int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("in")
    total = 0
    for number, (rows, group) in enumerate(files):
        write(numbered(total, total + rows), folder / f"{number}.parquet", row_group_size=group)
        total += rows
    source = Source.open(JobConfig(inputs=(str(folder),), output="o/"))
    assert source.num_rows == total
    for start, length, batch_rows in ranges:
        stop = min(start + length, total)
        batches = list(source.batches(start, stop, ["k"], batch_rows))
        assert [k for batch in batches for k in batch["k"].to_pylist()] == list(range(start, max(start, stop)))
        assert all(0 < batch.num_rows <= batch_rows for batch in batches)


def test_reading_on_decodes_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One big row group read part by part is not quadratic, and row groups before the start are not opened."""
    path = write(numbered(0, 20_000), tmp_path / "in.parquet", row_group_size=5_000)
    source = Source.open(JobConfig(inputs=(str(path),)))
    decoded: list[int] = []
    shape = cursor_module.Cursor._shape

    def counting(self: Any, batch: pa.RecordBatch, one: Any) -> pa.RecordBatch:
        decoded.append(batch.num_rows)
        return shape(self, batch, one)

    monkeypatch.setattr(cursor_module.Cursor, "_shape", counting)
    for start in range(0, 20_000, 1000):
        assert sum(batch.num_rows for batch in source.batches(start, start + 1000)) == 1000
    assert sum(decoded) <= 20_000
    decoded.clear()
    list(source.batches(15_100, 15_200))
    assert sum(decoded) <= 300
    for row in (15_400, 15_900, 16_300):  # forwards within a row group
        list(source.batches(row, row + 1))
    assert sum(decoded) <= 1500


def test_huge_values_come_in_small_batches(tmp_path: Path) -> None:
    """A small file whose footer says little can hold a big value in every row."""
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array(["x" * (1 << 20)]))
    path = write(pa.table({"prompt": value}), tmp_path / "in.parquet", store_schema=False, compression="zstd")
    assert path.stat().st_size < 2000
    source = Source.open(JobConfig(inputs=(str(path),)))
    assert source.schema.field("prompt").type == pa.string()
    sizes = [batch.nbytes for batch in source.batches(0, 400)]
    assert max(sizes) <= (80 << 20)
    assert sum(sizes) > (400 << 20)


class Inches(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.float32(), "punica.test.inches")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"v1"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Inches:
        return cls()


def every_type(rows: int = 90) -> pa.Table:
    """Columns of every kind that a Parquet file can hold, with nulls."""
    numbers = [None if i % 7 == 3 else i for i in range(rows)]
    texts = [None if i % 5 == 1 else f"v{i % 4} é" for i in range(rows)]
    dates = [None if i is None else datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=i) for i in numbers]
    unknown = pa.field(
        "unknown_ext", pa.int32(), metadata={"ARROW:extension:name": "nobody.knows", "ARROW:extension:metadata": "m"}
    )
    levels = pa.array([i % 3 for i in range(rows)], pa.int8())
    ordered = pa.DictionaryArray.from_arrays(levels, ["lo", "mid", "hi"], ordered=True)
    columns: list[tuple[pa.Field | str, pa.Array]] = [
        ("prompt", pa.array(texts)),
        (pa.field("strict", pa.int64(), nullable=False, metadata={"unit": "m"}), pa.array(range(rows))),
        ("dictionary", pa.array(texts).dictionary_encode()),
        ("ordered", ordered),
        ("large", pa.array(texts, pa.large_string())),
        ("binary", pa.array([None if t is None else t.encode() + b"\xff" for t in texts], pa.binary())),
        ("timezone", pa.array(dates, pa.timestamp("us", "Europe/Berlin"))),
        ("naive_ns", pa.array(dates, pa.timestamp("ns"))),
        ("decimal", pa.array([None if i is None else decimal.Decimal(i) / 4 for i in numbers], pa.decimal128(20, 2))),
        ("decimal256", pa.array([None if i is None else decimal.Decimal(i) for i in numbers], pa.decimal256(60, 0))),
        ("nothing", pa.nulls(rows)),
        ("nested", pa.array([None if i is None else [{"a": [i, None], "b": {"c": "x"}}] * (i % 3) for i in numbers])),
        ("fixed_list", pa.array([[i, i + 1] for i in range(rows)], pa.list_(pa.int16(), 2))),
        ("map", pa.array([None if i is None else [("k", i)] for i in numbers], pa.map_(pa.string(), pa.int32()))),
        ("bool", pa.array([None if i is None else i % 2 == 0 for i in numbers])),
        ("half", pa.array(np.arange(rows, dtype=np.float16))),
        ("unsigned", pa.array(numbers, pa.uint32())),
        ("day", pa.array(numbers, pa.date32())),
        ("clock", pa.array(numbers, pa.time64("us"))),
        ("duration", pa.array(numbers, pa.duration("ms"))),
        ("fixed_binary", pa.array([bytes([i]) * 4 for i in range(rows)], pa.binary(4))),
        ("inches", pa.ExtensionArray.from_storage(Inches(), pa.array(numbers, pa.float32()))),
        (unknown, pa.array(numbers, pa.int32())),
    ]  # fmt: skip
    fields = [one if isinstance(one, pa.Field) else pa.field(one, array.type) for one, array in columns]
    schema = pa.schema(fields, metadata={"owner": "someone", "huggingface": json.dumps({"info": {}})})
    return pa.table([array for _, array in columns], schema=schema)


@pytest.mark.parametrize("known", [True, False])
def test_every_type_comes_out_as_pyarrow_reads_it(tmp_path: Path, known: bool) -> None:
    path = write(every_type(), tmp_path / "in.parquet", row_group_size=30)
    if known:
        pa.register_extension_type(Inches())
    try:
        expected = pq.read_table(path)
        source = Source.open(JobConfig(inputs=(str(path),)))
        assert source.schema.equals(expected.schema, check_metadata=True)
        got = pa.Table.from_batches(source.batches(0, 90))
        assert got.schema.equals(expected.schema, check_metadata=True)
        assert got.equals(expected)
        assert pa.Table.from_batches(source.batches(25, 65)).equals(expected.slice(25, 40))
    finally:
        if known:
            pa.unregister_extension_type("punica.test.inches")


def test_identity_needs_no_whole_read(tmp_path: Path) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),))
    first = Source.open(config).files[0]
    assert first == Source.open(config).files[0]
    assert (first.path, first.size, first.rows) == (str(path), path.stat().st_size, 100)
    assert first.mtime == str(path.stat().st_mtime_ns)
    os.utime(path, ns=(1, 1))
    assert Source.open(config).files[0].mtime == "1"
    write(numbered(1, 101), path)
    assert Source.open(config).files[0].footer != first.footer


def test_a_remote_file_that_changes_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    with store.open("/swap/in.parquet", "wb") as file:
        pq.write_table(numbered(0, 100), file, row_group_size=50)
    source = Source.open(JobConfig(inputs=("memory://swap/in.parquet",), output="o/"))
    source.check_unchanged(0, 100)
    batches = source.batches(0, 100, batch_rows=10)
    next(batches)
    with store.open("/swap/in.parquet", "wb") as file:
        pq.write_table(numbered(100, 200), file, row_group_size=50)
    with pytest.raises(JobError, match=r"memory://swap/in\.parquet changed while"):
        list(batches)
    with pytest.raises(JobError, match=r"memory://swap/in\.parquet changed while"):
        source.check_unchanged(0, 1)
