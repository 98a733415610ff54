"""What ``benchmarks/million_rows.py`` measures, scaled down: memory and disk that do not grow with rows, and adapters
scattered at random over the input that still run in long turns and full batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from scale_input import make_adapters, make_model, write_rows
from scale_run import Watched, run_watched

ADAPTERS, BATCH, SLOTS, MAX_TOKENS = 40, 32, 4, 8
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    make_model(folder / "model")
    make_adapters(folder / "adapters", ADAPTERS)
    return folder


def run(folder: Path, source: Path, *options: str, engine: str = "real") -> tuple[Watched, Path]:
    output = source.with_suffix(".out.parquet")
    arguments = ["run", str(source), "--model", str(folder / "model"), "--adapters", str(folder / "adapters")]
    arguments += ["--device", "cpu", "--ignore-eos", *options]
    watched = run_watched(arguments, output, engine=engine, every=0.1, timeout=240)
    assert watched.code == 0, watched.stderr
    return watched, output


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "adapters").iterdir())


def assert_complete(source: Path, output: Path) -> pa.Table:
    rows, done = pq.read_table(source), pq.read_table(output)
    assert done.select(rows.column_names).equals(rows)
    assert done["error"].null_count == done.num_rows
    return done


def test_scattered_adapters_run_in_long_turns_and_full_batches(folder: Path) -> None:
    """Rows end a few at a time (each has 1 to 8 new tokens), and only 4 of 40 adapters fit the device."""
    source, rows = folder / "scattered.parquet", 6_000
    write_rows(source, rows, names(folder), max_tokens=MAX_TOKENS, row_group_rows=1_000)
    watched, output = run(folder, source, "--max-num-seqs", str(BATCH), "--max-loras", str(SLOTS))
    done = assert_complete(source, output)
    assert done["completion_tokens"].cast(pa.int32()).equals(done["max_tokens"])
    digests = set(zip(done["lora_id"].to_pylist(), done["adapter_sha256"].to_pylist(), strict=True))
    assert len(digests) == len({digest for _, digest in digests}) == ADAPTERS
    parent, worker = watched.counts["parent"], watched.counts["worker"]
    fair = rows / ADAPTERS  # all rows fit the window, so an adapter could have all of its own at once
    assert parent["rows"] / parent["turns"] > 0.4 * fair
    assert worker["loads"] < 3 * ADAPTERS
    assert worker["sequences"] / worker["steps"] > 0.8 * BATCH
    assert worker["segments"] / worker["steps"] < 2 * SLOTS


def test_memory_and_journal_do_not_grow_with_rows(folder: Path) -> None:
    costs = []
    for rows, row_group_rows in ((30_000, 10_000), (90_000, None)):
        source = folder / f"{rows}.parquet"
        write_rows(source, rows, names(folder), max_tokens=2, row_group_rows=row_group_rows)
        assert pq.read_metadata(source).num_row_groups == (3 if row_group_rows else 1)
        watched, output = run(folder, source, engine="stub")
        assert_complete(source, output)
        costs.append(watched)
    few, many = costs
    # Until the window is full it grows a little; a leak of half a KiB a row would be 30 MiB more.
    assert many.costs["parent"].peak - few.costs["parent"].peak < 48 * MIB
    assert many.costs["text"].peak - few.costs["text"].peak < 16 * MIB
    assert many.disk["journal"] < 24 * MIB  # three segments of 8 MiB, however many rows there were
    assert not Path(f"{output}.punica/journal").exists()
