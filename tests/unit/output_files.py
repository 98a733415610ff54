"""What lies in an output, for tests of its state."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from data_job import no_fsync, opened, update  # noqa: F401 - the first is a fixture

from punica_batch.config import JobConfig


def output(config: JobConfig) -> pa.Table:
    assert config.output is not None
    return pq.read_table(config.output)


def check_output(config: JobConfig, rows: int = 100) -> None:
    got = output(config)
    assert got["k"].to_pylist() == list(range(rows))
    said = [None if row % 11 == 7 else f"answer {row}.0 é" for row in range(rows)]
    assert got["generation"].to_pylist() == said


def files_of(config: JobConfig) -> dict[str, bytes]:
    assert config.output is not None
    path = Path(config.output)
    return {p.name: p.read_bytes() for p in ([path] if path.is_file() else sorted(path.glob("part-*")))}
