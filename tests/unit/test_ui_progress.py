"""The screen of a running job: what it shows, at which widths, and what a log gets instead."""

from __future__ import annotations

import io
import json
import re
import time

import pytest
from rich.console import Console

from punica_batch.progress import JobSummary, NoProgress, Snapshot, WorkerLine
from punica_batch.types import WorkerStats
from punica_batch.ui.format import count, duration, errors, short, size
from punica_batch.ui.progress import HeartbeatProgress, LiveProgress, draw, heartbeat_line, make_progress
from punica_batch.ui.summary import summary_view

STATS = WorkerStats(
    running=197, waiting=900, kv_blocks_used=20_480, kv_blocks_total=50_432, adapters_resident=137,
    prompt_tokens=10, generated_tokens=10, preemptions=0, steps=99,
)  # fmt: skip
RUNNING = Snapshot(
    rows_total=25_000, rows_done=12_345, rows_before=1_000, rows_error=42,
    errors_by_code={"unknown_adapter": 12, "overlong": 30}, parts_done=1, parts_total=3, prompt_tokens=501_000,
    generated_tokens=100_400, tokens_per_s=20_000, eta_s=65, elapsed_s=3605, phase="running",
    workers=(
        WorkerLine("GPU-3f2a9b01-0000-1111-2222-333344445555", "running", STATS, 12_034.5, 256),
        WorkerLine("1", "restarting"),
    ),
)  # fmt: skip


def drawn(snapshot: Snapshot, width: int, height: int = 50) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(draw(snapshot, width, height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_screen_shows_bar_eta_workers_and_errors() -> None:
    lines = drawn(RUNNING, 100)
    assert lines[0].startswith("running ━")
    assert lines[0].endswith("12,345/25,000 rows  49 % ETA 1:05")
    assert (
        lines[1]
        == ("20.0k tok/s · 501k prompt + 100k generated tokens · parts 1/3 · 1:00:05 elapsed · 1,000 rows done before")
        or len(lines[1]) <= 100
    )
    assert lines[2].split() == ["worker", "state", "batch", "KV", "blocks", "adapters", "tok/s"]
    assert lines[3].split() == ["3f2a9b01", "running", "197/256", "20.5k/50.4k", "137", "12.0k"]
    assert lines[4].split() == ["1", "restarting", "–", "–", "–", "0"]
    assert lines[5] == "42 errors: overlong 30 · unknown_adapter 12"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_screen_fits_any_width(width: int) -> None:
    lines = drawn(RUNNING, width)
    assert all(len(line) <= width for line in lines)
    assert any("12,345/25,000" in line for line in lines)
    if width >= 40:
        assert any("197/256" in line and "12.0k" in line for line in lines), "no figure is cut"


def test_many_workers_leave_the_screen_within_its_height() -> None:
    workers = tuple(WorkerLine(f"{i:02}", "running", STATS, 10.0, 256) for i in range(64))
    lines = drawn(Snapshot(10, workers=workers, phase="running"), 80, 16)
    assert len(lines) <= 16
    assert lines[-1].split() == ["others", "55", "more", "550"]


def test_percent_is_not_100_before_the_end() -> None:
    nearly = Snapshot(rows_total=100_000, rows_done=99_999, phase="running")
    assert "(99 %)" in heartbeat_line(nearly)
    assert "(100 %)" in heartbeat_line(Snapshot(rows_total=0, phase="done"))


def test_heartbeat_line() -> None:
    assert heartbeat_line(RUNNING) == (
        "running: 12,345 of 25,000 rows (49 %), 20.0k tok/s, ETA 1:05, "
        "42 errors (overlong 30 · unknown_adapter 12), 1 of 2 workers restarting"
    )


def test_heartbeat_has_first_line_beats_and_last_line() -> None:
    file = io.StringIO()
    progress = HeartbeatProgress(file, interval=0.02)
    progress.note("no NVIDIA device found: running one CPU worker")
    progress.update(Snapshot(10, rows_done=4, rows_before=4))
    progress.update(Snapshot(10, rows_done=5, phase="running"))  # no line of its own
    deadline = time.monotonic() + 20
    while file.getvalue().count("running: 5") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    progress.update(Snapshot(10, rows_done=10, phase="done", elapsed_s=75))
    progress.close()
    progress.close()
    lines = file.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("no NVIDIA"))
    assert "planning: 4 of 10 rows (40 %), 4 of them done before, 0:00 elapsed" in lines[first:]
    assert lines.count("running: 5 of 10 rows (50 %), 0 tok/s, ETA –") >= 2
    assert lines[-1] == "done: 10 of 10 rows (100 %), 0 tok/s, 1:15 elapsed"
    time.sleep(0.1)
    assert file.getvalue().splitlines() == lines, "nothing is written after close"


def test_heartbeat_shows_life_before_the_first_snapshot() -> None:
    file = io.StringIO()
    progress = HeartbeatProgress(file, interval=0.01)
    deadline = time.monotonic() + 20
    while "planning" not in file.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    progress.close()
    assert set(file.getvalue().splitlines()) == {"planning"}


def test_what_fits_the_console_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(quiet=True), NoProgress)
    log = make_progress(quiet=False, console=Console(file=io.StringIO(), force_terminal=False))
    assert isinstance(log, HeartbeatProgress)
    log.close()
    live = make_progress(quiet=False, console=Console(file=io.StringIO(), force_terminal=True))
    assert isinstance(live, LiveProgress)
    live.close()
    monkeypatch.setenv("TERM", "dumb")
    dumb = make_progress(quiet=False, console=Console(file=io.StringIO(), force_terminal=True))
    assert isinstance(dumb, HeartbeatProgress)
    dumb.close()


def test_live_screen_ends_with_the_last_snapshot_and_keeps_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    progress = LiveProgress(Console(file=file, force_terminal=True, width=80, height=24, color_system=None))
    progress.update(RUNNING)
    progress.note("worker 1 died (signal 9): [not markup]")
    progress.update(Snapshot(rows_total=25_000, rows_done=25_000, phase="done", elapsed_s=5))
    progress.close()
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "worker 1 died (signal 9): [not markup]" in text
    assert "25,000/25,000 rows 100 % 0:05" in text.splitlines()[-2] + text.splitlines()[-1] + text.splitlines()[-3]


def test_summary() -> None:
    summary = JobSummary(
        "x.parquet", rows=100, rows_done=100, rows_error=2, errors_by_code={"overlong": 2},
        finish_reasons={"stop": 90, "length": 8, "error": 2}, prompt_tokens=1000, generated_tokens=500,
        elapsed_s=61, tokens_per_s=8.2, warnings=("adapter 'a' was trained on another model",),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_view(summary))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "2 (overlong 2)" in text
    assert "stop 90 · length 8 · error 2" in text
    assert "1,000 prompt, 500 generated" in text
    assert "warning: adapter 'a' was trained on another model" in text
    assert summary.exit_code == 3
    assert summary.as_dict()["exit_code"] == 3
    assert JobSummary("x", 100, 100).exit_code == 0
    json.dumps(summary.as_dict())


def test_numbers_for_people() -> None:
    values = (0, 7.4, 999, 1000, 12_345, 99_949, 99_950, 501_000, 999_499, 999_500, 4_500_000, 2e9)
    assert [short(n) for n in values] == [
        "0", "7", "999", "1.0k", "12.3k", "99.9k", "100k", "501k", "999k", "1.0M", "4.5M", "2.0G",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 7, 754, 12_300, 185_100)] == ["0:00", "0:07", "12:34", "3:25:00", "2d 03:25"]
    assert [size(b) for b in (10, 2048, 5 << 20, 3 << 29)] == ["10 B", "2 KiB", "5 MiB", "1.5 GiB"]
    assert errors({"b": 1, "a": 1, "c": 5000}) == "c 5,000 · a 1 · b 1"
    assert count(1234567) == "1,234,567"
