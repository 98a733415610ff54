"""The product on the shipped sample: held-out answers through ``run``, and the job files that users copy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from punica_batch import JobConfig, run_job

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_data"
ROWS_EACH = 25  # of the 50 held-out ones an adapter


def accuracy(table: pa.Table) -> dict[str, float]:
    right: dict[str, list[bool]] = defaultdict(list)
    for row in table.to_pylist():
        right[row["asked"]].append(row["generation"] == row["expected"])
    return {name: sum(answers) / len(answers) for name, answers in right.items()}


def run(rows: pa.Table, folder: Path, **options: object) -> pa.Table:
    pq.write_table(rows, folder / "rows.parquet")
    config = JobConfig.model_validate(
        {
            "inputs": (str(folder / "rows.parquet"),),
            "output": str(folder / "out.parquet"),
            "model": str(SAMPLE / "model"),
            "adapters": str(SAMPLE / "adapters.toml"),
            "max_tokens": 48,
            "device": "cpu",
            **options,
        }
    )
    assert run_job(config).rows_error == 0
    return pq.read_table(folder / "out.parquet")


@pytest.fixture(scope="module")
def held_out() -> pa.Table:
    table = pq.read_table(SAMPLE / "heldout.parquet")
    asked = table["lora_id"].to_pylist()
    table = table.append_column("asked", pa.array(asked))
    kept = [i for i, name in enumerate(asked) if asked[:i].count(name) < ROWS_EACH]
    return table.take(kept)


@pytest.mark.slow
def test_every_adapter_does_its_own_job_in_one_mixed_run(held_out: pa.Table, tmp_path: Path) -> None:
    found = accuracy(run(held_out, tmp_path))
    assert len(found) == 8
    assert min(found.values()) >= 0.9, found


@pytest.mark.slow
def test_the_base_model_does_none_of_them(held_out: pa.Table, tmp_path: Path) -> None:
    """The same prompts without their adapters: a product that ignored ``lora_id`` would pass everything else."""
    names = held_out["lora_id"].to_pylist()
    templates = (SAMPLE / "adapters.toml").read_text(encoding="utf-8")
    assert '"### Message\\n{prompt}\\n### Answer\\n"' in templates
    bare = held_out.set_column(held_out.schema.get_field_index("lora_id"), "lora_id", pa.nulls(len(names), pa.string()))
    template = "### Message\n{prompt}\n### Answer\n"
    found = accuracy(run(bare, tmp_path, prompt_template=template))
    assert max(found.values()) <= 0.1, found


@pytest.mark.slow
@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_job_files_run_as_shipped(job: Path, tmp_path: Path) -> None:
    suffix = {"chat": "out.jsonl", "samples": "out/"}.get(job.stem, "out.parquet")
    command = [
        sys.executable,
        "-m",
        "punica_batch",
        "run",
        "--config",
        str(job),
        "-o",
        f"{tmp_path}/{suffix}",
        "--json",
    ]
    done = subprocess.run([*command, "--device", "cpu", "--limit", "12"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["rows"] == summary["rows_done"] == 12
    assert summary["rows_error"] == 0
