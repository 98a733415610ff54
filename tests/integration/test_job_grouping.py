"""Adapters scattered at random over the rows: rows of one adapter meet, and each adapter is loaded about once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from job_tools import SAMPLE, Job, make_rows

ROWS, ADAPTERS, SLOTS = 900, 60, 4


@pytest.mark.slow
def test_scattered_adapters_run_grouped(tmp_path: Path) -> None:
    """Real engine with few slots. Rows in input order would load an adapter for nearly every row."""
    names = [f"a{i:02}" for i in range(ADAPTERS)]
    for name in names:
        shutil.copytree(SAMPLE / "adapters" / "topic", tmp_path / "adapters" / name)
    rows = make_rows(ROWS, names=names)
    pq.write_table(rows, tmp_path / "rows.parquet")
    options = ("--max-tokens", "1", "--max-loras", str(SLOTS), "--max-num-seqs", "32")
    job = Job(tmp_path, "out.parquet", options=options, adapters=tmp_path / "adapters")
    ended = job.run("-q", env={"JOB_TEST_LOADS": str(tmp_path / "loads")})
    assert ended.code == 0, ended.stderr
    output = job.table()
    assert output["id"].to_pylist() == rows["id"].to_pylist()
    assert output["error"].null_count == ROWS
    loads = (tmp_path / "loads").read_text().split()
    assert set(loads) == set(names)
    assert len(loads) <= 2 * ADAPTERS
