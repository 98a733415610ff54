from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import data_job
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_job import no_fsync  # noqa: F401 - a fixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_data_source import Inches, every_type, write

from punica_batch.config import JobConfig
from punica_batch.data import staged as staged_module
from punica_batch.data.rowgroups import data_bytes, row_groups
from punica_batch.data.schema import output_schema, result_schema, results_to_batch
from punica_batch.data.source import Source
from punica_batch.data.state import JobState
from punica_batch.errors import DiskFull, InputError, StoreAway

pytestmark = pytest.mark.usefixtures("no_fsync")

GENERATED = ["generation", "finish_reason", "prompt_tokens", "completion_tokens", "error", "adapter_sha256"]


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
@pytest.mark.parametrize("known", [True, False])
def test_every_carried_type_round_trips(tmp_path: Path, output: str, known: bool) -> None:
    path = write(every_type(), tmp_path / "in.parquet", row_group_size=30)
    if known:
        pa.register_extension_type(Inches())
    try:
        config = JobConfig(
            inputs=(str(path),), output=str(tmp_path / output) + "/" * output.endswith("/"), rows_per_shard=40
        )
        data_job.run(config)
        expected, got = pq.read_table(path), pq.read_table(tmp_path / output)
        assert got.schema.names == [*expected.schema.names, *GENERATED]
        carried = got.select(expected.schema.names)
        assert carried.schema.equals(expected.schema, check_metadata=True)
        assert carried.equals(expected)
        assert [got.schema.field(name).type for name in GENERATED] == [
            pa.large_string(), pa.string(), pa.int32(), pa.int32(), pa.string(), pa.string(),
        ]  # fmt: skip
        rows = [data_job.result(row, config) for row in range(90)]
        assert (
            got.select(GENERATED).to_pylist() == results_to_batch(rows, result_schema(config, lists=False)).to_pylist()
        )
    finally:
        if known:
            pa.unregister_extension_type("punica.test.inches")


def parts_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*.parquet"))}


def test_input_row_groups_leave_no_trace(tmp_path: Path) -> None:
    """The same rows in 30-row groups or in one give the same bytes, in whatever order they ran."""
    outputs = []
    for number, group in enumerate([30, 90, 7]):
        path = write(every_type(), tmp_path / f"{number}" / "in.parquet", row_group_size=group)
        out = tmp_path / f"out{number}"
        data_job.run(JobConfig(inputs=(str(path),), output=f"{out}/", rows_per_shard=50, logprobs=1), seed=number)
        outputs.append(parts_of(out))
    assert list(outputs[0]) == ["part-00000.parquet", "part-00001.parquet"]
    assert outputs[0] == outputs[1] == outputs[2]


def test_pages_carry_checksums(tmp_path: Path) -> None:
    path = write(pa.table({"prompt": [f"needle {i}" for i in range(50)]}), tmp_path / "in.parquet")
    data_job.run(JobConfig(inputs=(str(path),), output=str(tmp_path / "out.parquet")))
    content = bytearray((tmp_path / "out.parquet").read_bytes())
    chunk = pq.read_metadata(tmp_path / "out.parquet").row_group(0).column(0)
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    (tmp_path / "out.parquet").write_bytes(content)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(tmp_path / "out.parquet", page_checksum_verification=True).read()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 90), max_size=8), st.sampled_from([64, 128, 16_384]), st.sampled_from([1, 1500, 1 << 20])
)
def test_row_groups_do_not_depend_on_batches(cuts: list[int], rows: int, size: int) -> None:
    table = every_type()
    whole = list(row_groups(table.to_batches(), table.schema, rows=rows, size=size))
    edges = sorted({0, 90, *cuts})
    pieces = [table.slice(a, b - a).combine_chunks().to_batches()[0] for a, b in pairwise(edges)]
    cut = list(row_groups(pieces, table.schema, rows=rows, size=size))
    assert [group.num_rows for group in cut] == [group.num_rows for group in whole]
    assert all(group.num_rows % 64 == 0 for group in whole[:-1])
    assert pa.concat_tables(cut).equals(pa.concat_tables(whole))
    assert pa.concat_tables(cut).equals(table)


@given(st.integers(0, 90), st.integers(0, 90))
@settings(deadline=None)
def test_data_bytes_is_a_sum_over_rows(first: int, second: int) -> None:
    a, b = sorted((first, second))
    for column in every_type().combine_chunks().columns:
        array = column.chunk(0)
        pieces = [array.slice(0, a), array.slice(a, b - a), array.slice(b)]
        assert sum(map(data_bytes, pieces)) == data_bytes(array)
    assert data_bytes(pa.array(["abc", None, "de"])) == 5 + 3 * 4


def test_row_groups_are_bounded_in_bytes() -> None:
    table = pa.table({"p": pa.array(["x" * 10_000] * 1000)})
    groups = list(row_groups(table.to_batches(200), table.schema, size=1 << 20))
    assert len(groups) > 5
    assert max(group.nbytes for group in groups) < 2 << 20


def test_dictionaries_too_many_for_their_index_type() -> None:
    """Files that each have few categories can have more together than an int8 counts."""
    kind = pa.dictionary(pa.int8(), pa.string())
    batches = []
    for part in range(4):
        values = [f"{part}-{i}" for i in range(100)]
        batches.append(
            pa.record_batch([pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), values)], ["d"])
        )
    groups = list(row_groups(batches, pa.schema([("d", kind)])))
    assert all(group["d"].num_chunks == 1 for group in groups)
    assert [v for g in groups for v in g["d"].to_pylist()] == [f"{p}-{i}" for p in range(4) for i in range(100)]


def test_long_dictionaries_shrink_to_what_is_used() -> None:
    values = [f"value {i}" for i in range(100_000)]
    array = pa.DictionaryArray.from_arrays(pa.array([70_000, None, 5, 70_000], pa.int32()), values, ordered=True)
    (group,) = row_groups([pa.record_batch([array], ["d"])], pa.schema([("d", array.type)]))
    assert group["d"].to_pylist() == ["value 70000", None, "value 5", "value 70000"]
    assert group["d"].chunk(0).dictionary.to_pylist() == ["value 5", "value 70000"]
    assert group["d"].type == array.type


def test_output_schema_rules() -> None:
    source = pa.schema(
        [pa.field("prompt", pa.string()), pa.field("error", pa.int64(), metadata={"a": "b"})],
        metadata={"pandas": "{}", "x": "y"},
    )
    with pytest.raises(InputError, match=r"input column 'error' would be hidden .*--output-prefix"):
        output_schema(source, JobConfig())
    prefixed = output_schema(source, JobConfig(output_prefix="llm_"))
    assert prefixed.names == ["prompt", "error", *(f"llm_{name}" for name in GENERATED)]
    assert prefixed.metadata == source.metadata
    assert prefixed.field("error").metadata == {b"a": b"b"}
    subset = output_schema(source, JobConfig(columns=("prompt",)))
    assert subset.names == ["prompt", *GENERATED]
    assert subset.metadata == {b"x": b"y"}
    keyed = pa.schema([("prompt", pa.string()), ("key", pa.int64()), ("other", pa.int64())])
    assert output_schema(keyed, JobConfig(columns=("prompt",), id_column="key")).names[:3] == [
        "key",
        "prompt",
        GENERATED[0],
    ]
    lists = output_schema(pa.schema([("n", pa.int64())]), JobConfig(logprobs=3))
    assert lists.field("generation").type == pa.list_(pa.large_string())
    assert lists.field("finish_reason").type == pa.list_(pa.string())
    assert lists.field("prompt_tokens").type == pa.int32()
    top = pa.list_(pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])))
    assert output_schema(source, JobConfig(output_prefix="x", logprobs=0)).field("xtop_logprobs").type == top
    assert lists.field("top_logprobs").type == pa.list_(top)
    assert lists.field("token_ids").type == pa.list_(pa.list_(pa.int32()))


@pytest.mark.parametrize("n", [None, 2])
def test_logprobs_and_samples_in_the_output(tmp_path: Path, n: int | None) -> None:
    path = write(pa.table({"prompt": [f"p{i}" for i in range(30)]}), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=str(tmp_path / "out.parquet"), n=n, logprobs=2, columns=())
    data_job.run(config)
    got = pq.read_table(tmp_path / "out.parquet")
    assert got.num_rows == 30
    failed, good = got.slice(7, 1).to_pylist()[0], got.slice(8, 1).to_pylist()[0]
    ids = [0, 1, 2, 3]
    top = [[{"token_id": 0, "logprob": 0.0}, {"token_id": 1, "logprob": -1.0}]] * 4
    if n is None:
        assert (good["generation"], good["finish_reason"], good["token_ids"]) == ("answer 8.0 é", "stop", ids)
        assert good["top_logprobs"] == top
        assert (failed["generation"], failed["finish_reason"], failed["token_ids"]) == (None, "error", None)
    else:
        assert (good["generation"], good["completion_tokens"]) == (["answer 8.0 é", "answer 8.1 é"], [4, 4])
        assert good["top_logprobs"] == [top, top]
        assert (failed["generation"], failed["finish_reason"], failed["top_logprobs"]) == (None, ["error"], None)


def test_commits_say_what_a_part_is(tmp_path: Path) -> None:
    path = write(pa.table({"prompt": [f"p{i}" for i in range(50)]}), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=20)
    data_job.run(config)
    with JobState.open(config, data_job.BINDING, source=Source.open(config)) as state:
        assert [(info.first_row, info.rows) for info in state.parts] == [(0, 20), (20, 20), (40, 10)]
        for info in state.parts:
            content = (tmp_path / "out" / info.name).read_bytes()
            assert (info.bytes, info.sha256) == (len(content), hashlib.sha256(content).hexdigest())
            results = [data_job.result(row, config) for row in range(info.first_row, info.first_row + info.rows)]
            assert info.error_rows == sum(one.error is not None for one in results)
            assert info.prompt_tokens == sum(one.prompt_tokens or 0 for one in results)
            tokens = sum(len(sample.token_ids) for one in results for sample in one.completions)
            assert info.completion_tokens == tokens


def test_a_full_disk_leaves_no_partial_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0)
    path = write(pa.table({"prompt": [noise.bytes(300).hex() for _ in range(90)]}), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=30)
    real = staged_module.StagedFile.write
    room = 9000

    class Full:
        """A file on a disk with little room."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            nonlocal room
            if room < len(data):
                raise OSError(errno.ENOSPC, "No space left on device")
            room -= len(data)
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def write_full(self: Any, data: Any) -> int:
        if not isinstance(self._file, Full):
            self._file = Full(self._file)
        return real(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(staged_module.StagedFile, "write", write_full)
        with pytest.raises(DiskFull, match="no room on the disk"):
            data_job.run(config)
    assert list(parts_of(tmp_path / "out")) in ([], ["part-00000.parquet"])
    assert list((tmp_path / "out" / "_punica" / "staging").iterdir()) == []
    data_job.run(config)
    assert pq.read_table(tmp_path / "out").num_rows == 90


def test_another_fault_in_the_middle_of_a_part_keeps_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that goes away while a part is written is not a fault of the disk that the part is on."""
    path = write(pa.table({"prompt": ["a"] * 9}), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=3)

    def away(*args: object, **kwargs: object) -> Iterator[pa.RecordBatch]:
        raise StoreAway("the input's store does not answer")
        yield

    with monkeypatch.context() as patched:
        patched.setattr(Source, "batches", away)
        with pytest.raises(StoreAway, match="the input's store"):
            data_job.run(config)
    assert data_job.run(config)["finished"]


def test_an_empty_input_gives_an_empty_output(tmp_path: Path) -> None:
    path = write(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    for output in (f"{tmp_path}/out.parquet", f"{tmp_path}/out/"):
        assert data_job.run(JobConfig(inputs=(str(path),), output=output)) == {"ran": 0, "finished": True}
        got = pq.read_table(output)
        assert (got.num_rows, got.schema.names) == (0, ["prompt", *GENERATED])
