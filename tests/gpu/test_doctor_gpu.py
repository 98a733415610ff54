"""``doctor`` on a GPU machine: what it says is true, and what it builds is all that a job uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from punica_batch import JobConfig, run_job

SAMPLE = Path(__file__).parents[2] / "sample_data"
JOB = ("--model", str(SAMPLE / "model"), "--adapters", str(SAMPLE / "adapters.toml"), "--dtype", "float16")
COMPILED = (".so", ".cubin")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(cache))
    for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)


def doctor(*options: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(checks by name, the lines of progress)"""
    done = subprocess.run(
        [sys.executable, "-m", "punica_batch", "doctor", "--json", *options],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}, done.stderr.splitlines()


def compiled(cache: Path) -> set[Path]:
    return {path for path in cache.rglob("*") if path.suffix in COMPILED}


def test_it_says_what_is_there() -> None:
    checks, _ = doctor()
    print(json.dumps(checks, indent=1))
    assert torch.cuda.get_device_name() in checks["torch"]["found"]
    assert checks["triton"]["level"] == "ok"
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    assert any(f"compute capability {capability}" in c["found"] for name, c in checks.items() if name[:4] == "gpu ")
    assert checks["kernels"]["level"] == "absent"


def test_what_it_builds_is_what_a_job_uses(cache: Path, tmp_path: Path) -> None:
    _, first = doctor(*JOB)
    built = compiled(cache)
    checks, second = doctor(*JOB)
    print(*first, "--", *second, sep="\n")
    assert checks["kernels"]["found"].startswith("all were there"), "a second time there is nothing to do"
    assert all(line.endswith("there") for line in second)
    assert any(path.suffix == ".cubin" for path in built)
    if checks["flashinfer"]["level"] == "ok":
        assert {line.partition(":")[0] for line in first} >= {"flashinfer norm", "flashinfer silu_and_mul"}
        assert "failed" not in "".join(first)
        backend = next(line for line in first if line.startswith("backend"))
        assert backend.endswith("there"), f"FlashInfer compiled something that is not in the list: {backend}"
    out = tmp_path / "out.parquet"
    run_job(
        JobConfig(
            inputs=(str(SAMPLE / "requests.parquet"),), output=str(out), model=str(SAMPLE / "model"),
            adapters=str(SAMPLE / "adapters.toml"), dtype="float16", max_tokens=32, gpus="1",
        )
    )  # fmt: skip
    assert pq.read_table(out)["error"].null_count == 256
    assert sorted(path.name for path in compiled(cache) - built) == [], "the job had to compile"
