"""One job on two GPUs: a worker a GPU, on cores of its own; each row comes back once, in order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from punica_batch import JobConfig, run_job
from punica_batch.workers.devices import find_devices

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
SAMPLE = Path(__file__).parents[2] / "sample_data"
psutil = pytest.importorskip("psutil")


def config(out: Path, gpus: str) -> JobConfig:
    return JobConfig(
        inputs=(str(SAMPLE / "requests.parquet"),), output=str(out), model=str(SAMPLE / "model"),
        adapters=str(SAMPLE / "adapters.toml"), max_tokens=32, max_num_seqs=16, gpus=gpus,
    )  # fmt: skip


def test_rows_come_back_once_and_in_order(tmp_path: Path) -> None:
    """Nearly all texts are as on one GPU: a row's batch can tip a near-tie."""
    tables = []
    for gpus in ("1", "2"):
        out = tmp_path / f"{gpus}.parquet"
        assert run_job(config(out, gpus)).exit_code == 0
        tables.append(pq.read_table(out))
    one, two = tables
    for name in ("id", "prompt", "lora_id", "error", "prompt_tokens", "adapter_sha256"):
        assert one[name].equals(two[name]), name
    parted = sum(a != b for a, b in zip(one["generation"].to_pylist(), two["generation"].to_pylist(), strict=True))
    assert parted <= 0.05 * one.num_rows


def test_each_worker_has_its_gpu_and_its_cores(tmp_path: Path) -> None:
    devices = find_devices(config(tmp_path / "x", "2"), print)
    assert len({device.name for device in devices}) == 2
    if len(os.sched_getaffinity(0)) >= 4:
        assert not devices[0].cores & devices[1].cores
    rows, out = str(SAMPLE / "requests.parquet"), str(tmp_path / "y.parquet")
    command = [
        sys.executable, "-m", "punica_batch", "run", rows, "-o", out, "--model", str(SAMPLE / "model"),
        "--adapters", str(SAMPLE / "adapters.toml"), "--gpus", "2",
    ]  # fmt: skip
    seen: dict[str, set[int]] = {}
    with subprocess.Popen(command) as job:
        while job.poll() is None and len(seen) < 2:
            for child in psutil.Process(job.pid).children():
                try:
                    if any("workers.worker" in part for part in child.cmdline()):
                        seen[child.environ()["CUDA_VISIBLE_DEVICES"]] = set(child.cpu_affinity())
                except (psutil.NoSuchProcess, KeyError):
                    continue
            time.sleep(0.02)
    assert job.returncode == 0
    assert seen == {device.name: set(device.cores) for device in devices}
