"""Runs the product in processes of its own and watches what it costs: memory, CPU time, disk, time to the first row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

HOOK = Path(__file__).parent / "scale_hook"
ROLES = {"punica_batch.workers.worker": "worker", "punica_batch.workers.text_worker": "text"}


@dataclass
class Cost:
    """One process's (or role's): resident bytes sampled over time, the kernel's peak, CPU seconds so far."""

    samples: list[int] = field(default_factory=list)
    peak: int = 0
    cpu_seconds: float = 0.0

    @property
    def steady(self) -> int:
        """The median of the second half of the run."""
        return int(median(self.samples[len(self.samples) // 2 :])) if self.samples else 0


@dataclass
class Watched:
    """``seconds``: start to exit. ``first_row_s``: start to the first finished row in the parent's hands.
    ``disk``: the most bytes seen under each folder of the state. ``counts``: what ``scale_hook`` counted."""

    seconds: float
    first_row_s: float | None
    costs: dict[str, Cost]
    disk: dict[str, int]
    counts: dict[str, dict[str, float]]
    load: float
    code: int
    stderr: str


def run_watched(
    arguments: list[str], output: Path, *, engine: str = "real", every: float = 0.5, timeout: float = 7200.0
) -> Watched:
    """``punica-batch`` with ``arguments`` and ``-o output`` (a file), to its end; samples ``every`` so many seconds."""
    state = output.with_name(output.name + ".punica")
    costs: dict[str, Cost] = {}
    disk: Counter[str] = Counter()
    loads = []
    with tempfile.TemporaryDirectory() as counts, tempfile.TemporaryFile("w+") as stderr:
        environment = os.environ | {"PYTHONPATH": str(HOOK), "SCALE_COUNTS": counts, "SCALE_ENGINE": engine}
        began, clock = time.time(), time.monotonic()
        process = psutil.Popen(
            [sys.executable, "-m", "punica_batch", *arguments, "-o", str(output)],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - clock < timeout:
                _sample(process, costs)
                for name, size in _disk(state).items():
                    disk[name] = max(disk[name], size)
                loads.append(os.getloadavg()[0])
                time.sleep(every)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        seconds = time.monotonic() - clock
        counted = {path.stem: json.loads(path.read_text()) for path in Path(counts).glob("*.json")}
        stderr.seek(0)
        first = counted.get("parent", {}).pop("first_row_at", None)
        return Watched(
            seconds, first and first - began, costs, dict(disk), counted, median(loads), process.returncode,
            stderr.read(),
        )  # fmt: skip


def _sample(process: psutil.Process, costs: dict[str, Cost]) -> None:
    try:
        roles = [("parent", process), *((_role(child), child) for child in process.children())]
    except psutil.NoSuchProcess:
        return
    for role, one in roles:
        try:
            cpu, peak = one.cpu_times(), _peak(one.pid)
            cost = costs.setdefault(role, Cost())
            cost.samples.append(one.memory_info().rss)
            cost.peak = max(cost.peak, peak)
            cost.cpu_seconds = cpu.user + cpu.system
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue


def _role(child: psutil.Process) -> str:
    try:
        return next((ROLES[word] for word in child.cmdline() if word in ROLES), "other")
    except psutil.NoSuchProcess:
        return "other"


def _peak(pid: int) -> int:
    """The kernel's high-water mark of resident memory, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _disk(state: Path) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for folder, _, names in os.walk(state):
        kind = Path(folder).relative_to(state).parts[:1]
        for name in names:
            try:
                sizes[kind[0] if kind else "files"] += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return dict(sizes)


def summary(watched: Watched, rows: int) -> dict[str, Any]:
    """Plain numbers: seconds, rows a second, MiB."""
    mib = 2**20
    result: dict[str, Any] = {
        "rows": rows,
        "seconds": round(watched.seconds, 1),
        "rows_s": round(rows / watched.seconds),
        "first_row_s": watched.first_row_s and round(watched.first_row_s, 1),
        "load": round(watched.load, 1),
    }
    for role, cost in sorted(watched.costs.items()):
        result[f"{role}_peak_mib"] = round(cost.peak / mib, 1)
        result[f"{role}_steady_mib"] = round(cost.steady / mib, 1)
        result[f"{role}_cpu_us_row"] = round(1e6 * cost.cpu_seconds / rows, 1)
    for name, size in sorted(watched.disk.items()):
        result[f"disk_{name}_mib"] = round(size / mib, 1)
    parent, worker = watched.counts.get("parent", {}), watched.counts.get("worker", {})
    if parent.get("sends"):
        result["rows_a_send"] = round(parent["rows"] / parent["sends"], 1)
        result["rows_a_turn"] = round(parent["rows"] / max(parent["turns"], 1), 1)
    if worker.get("steps"):
        result["sequences_a_step"] = round(worker["sequences"] / worker["steps"], 1)
        result["segments_a_step"] = round(worker["segments"] / worker["steps"], 1)
        result["adapter_loads"] = round(worker.get("loads", 0))
    return result
