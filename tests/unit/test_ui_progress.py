"""The screen of a running job: what it shows, at which widths, and what a log gets instead."""

from __future__ import annotations

import io
import json
import os
import re
import termios
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from punica_batch.progress import JobSummary, NoProgress, Phase, Snapshot, WorkerLine
from punica_batch.types import WorkerStats
from punica_batch.ui.format import count, duration, errors, kib, plural, short, size
from punica_batch.ui.lines import folded, write_line
from punica_batch.ui.progress import HeartbeatProgress, LiveProgress, draw, heartbeat_line, make_progress
from punica_batch.ui.summary import summary_view

STATS = WorkerStats(
    running=197, waiting=900, kv_blocks_used=20_480, kv_blocks_total=50_432, adapters_resident=137,
    prompt_tokens=10, generated_tokens=10, preemptions=0, steps=99,
)  # fmt: skip
RUNNING = Snapshot(
    rows_total=25_000, rows_done=12_345, rows_before=1_000, rows_error=42,
    errors_by_code={"unknown_adapter": 12, "overlong": 30}, parts_done=1, parts_total=3, prompt_tokens=501_000,
    generated_tokens=100_400, tokens_per_s=20_000, mean_tokens_per_s=18_210, eta_s=65, elapsed_s=3605, phase="running",
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
    assert lines[1] == (
        "20.0k tok/s (average 18.2k) · 501k prompt + 100k generated tokens · 1:00:05 elapsed · parts 1/3"
    ), "the rows done before find no room"
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
        "running: 12,345 of 25,000 rows (49 %), 20.0k tok/s (average 18.2k), ETA 1:05, "
        "42 errors (overlong 30 · unknown_adapter 12), 1 of 2 workers restarting"
    )


def test_a_single_error_is_not_plural() -> None:
    one = replace(RUNNING, rows_error=1, errors_by_code={"overlong": 1}, workers=RUNNING.workers[1:])
    assert heartbeat_line(one).endswith("ETA 1:05, 1 error (overlong 1), 1 of 1 worker restarting")
    assert drawn(one, 100)[-1] == "1 error: overlong 1"


def test_phases_in_a_log_and_on_a_screen() -> None:
    def both(**changes: Any) -> tuple[str, list[str]]:
        snapshot = replace(Snapshot(100, 25, elapsed_s=65, generated_tokens=130, tokens_per_s=2), **changes)
        line, screen = heartbeat_line(snapshot), drawn(snapshot, 80)
        assert len(screen) == 2
        return line, [screen[0].split()[-2:], screen[1]]

    rows = "25 of 100 rows (25 %)"
    assert both() == (f"planning: {rows}, 1:05 elapsed", [["1:05", "elapsed"], ""])
    assert both(phase="starting") == (
        f"starting (loading the model): {rows}, 1:05 elapsed",
        [["1:05", "elapsed"], "loading the model"],
    )
    assert both(phase="running")[0] == f"running: {rows}, 2 tok/s (average 0), ETA –"
    assert both(phase="assembling")[0] == f"assembling: {rows}, 1:05 elapsed"
    assert both(phase="done")[0] == f"done: {rows}, 2 tok/s, 1:05 elapsed"
    assert both(phase="checking", eta_s=3) == (f"checking: {rows}, ETA 0:03", [["ETA", "0:03"], "1:05 elapsed"])
    stopped, screen = both(phase="stopped")
    assert stopped == f"stopped: {rows}, 2 tok/s, 1:05 elapsed"
    assert screen == [["1:05", "elapsed"], "2 tok/s · 0 prompt + 130 generated tokens"]


@pytest.mark.parametrize(
    ("reason", "hint"),
    [("SIGINT", "Ctrl-C again ends at once"), ("SIGTERM", "a second signal ends at once"), ("--max-runtime", None)],
)
def test_stopping_shows_the_grace_and_how_to_end_at_once(reason: str, hint: str | None) -> None:
    s = replace(RUNNING, phase="stopping", stop_reason=reason, grace_s=11.6, eta_s=None, rows_error=0)
    line = heartbeat_line(s)
    assert line.startswith(f"stopping ({reason}): 12,345 of 25,000 rows (49 %), ")
    assert "12 s of grace left" in line
    screen = drawn(s, 80)
    assert screen[0].startswith("stopping ━")
    assert screen[0].endswith(" 12 s of grace left")
    assert not any("ETA" in each for each in (line, *screen))
    for text in (line, screen[1]):
        assert hint is None or hint in text
        assert ("at once" in text) == (hint is not None)


def test_heartbeat_has_first_line_beats_and_last_line() -> None:
    file = io.StringIO()
    progress = HeartbeatProgress(file, interval=0.02)
    progress.note("no NVIDIA device found: running one CPU worker")
    progress.update(Snapshot(10, rows_done=4, rows_before=4))
    progress.update(Snapshot(10, rows_done=4, phase="running"))
    progress.update(Snapshot(10, rows_done=5, phase="running"))  # the phase goes on: no line of its own
    deadline = time.monotonic() + 20
    while file.getvalue().count("running: 5") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    progress.update(Snapshot(10, rows_done=10, phase="done", elapsed_s=75))
    progress.close()
    progress.close()
    lines = file.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("no NVIDIA"))
    assert "planning: 4 of 10 rows (40 %), 4 of them done before, 0:00 elapsed" in lines[first:]
    assert "running: 4 of 10 rows (40 %), ETA –" in lines[first:]
    assert lines.count("running: 5 of 10 rows (50 %), ETA –") >= 2
    assert lines[-1] == "done: 10 of 10 rows (100 %), 0 tok/s, 1:15 elapsed"
    time.sleep(0.1)
    assert file.getvalue().splitlines() == lines, "nothing is written after close"


def test_every_phase_has_its_line_however_short_it_is() -> None:
    file = io.StringIO()
    progress = HeartbeatProgress(file, interval=3600)
    phases: tuple[Phase, ...] = ("planning", "starting", "running", "running", "assembling", "done", "done")
    for phase in phases:
        progress.update(Snapshot(10, phase=phase))
    progress.close()
    seen = [line.partition(":")[0] for line in file.getvalue().splitlines()]
    assert seen == ["planning", "starting (loading the model)", "running", "assembling", "done"]


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


@pytest.mark.parametrize("width", [40, 80])
def test_a_note_above_the_screen_breaks_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    path = "s3://bucket/" + "a-very-long-name/" * 6
    note = f"warning: adapter 'sentiment-classification-v2' was trained on another base model than {path} says it is"
    file = io.StringIO()
    progress = LiveProgress(Console(file=file, force_terminal=True, width=width, height=24, color_system=None))
    progress.note(note)
    progress.close()
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).splitlines()]
    words = " ".join(lines).split()
    assert " ".join(note.split()) in " ".join(words), "no word is broken, the path included"
    assert all(len(line) <= width or line == path for line in lines)
    assert folded(note, None) == note


@pytest.mark.parametrize("width", [20, 60, 80, 100, 110, 132])
def test_commands_stay_in_one_line_when_lines_are_folded(width: int) -> None:
    commands = ["`punica-batch retry my own rows.parquet`", "python -c 'import pyarrow.csv as r; print(1, 2, 3)'"]
    line = f"five of all the rows have failed, and so {commands[0]} runs those again; or convert it: {commands[1]}"
    lines = folded(line, width).splitlines()
    assert len(lines) > 1
    assert all(any(command in each for each in lines) for command in commands)
    assert " ".join(lines) == line


def test_lines_are_folded_on_a_terminal_only() -> None:
    line = "punica-batch: stopped by SIGINT with 1,234 of 3,072 rows done; " * 3
    reader, writer = os.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    with os.fdopen(writer, "w") as terminal:
        write_line(line, terminal)
        shown = os.read(reader, 10_000).decode().splitlines()
    os.close(reader)
    assert len(shown) > 2
    assert all(len(each) <= 80 for each in shown)
    assert " ".join(shown).split() == line.split()
    log = io.StringIO()
    write_line(line, log)
    assert log.getvalue() == line + "\n"


def test_summary() -> None:
    summary = JobSummary(
        "x.parquet", rows=100, rows_done=100, rows_error=2, errors_by_code={"overlong": 2},
        finish_reasons={"stop": 90, "length": 8, "error": 2}, prompt_tokens=1000, generated_tokens=500,
        elapsed_s=61, tokens_per_s=8.2, rows_run=100, warnings=("adapter 'a' was trained on another model",),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_view(summary))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "2 (overlong 2)" in text
    assert "stop 90 · length 8 · error 2" in text
    assert re.search(r"tokens +1,000 prompt, 500 generated *\n", text)
    assert re.search(r"time +1:01 \(8 generated tok/s\) *\n", text)
    assert "warning: adapter 'a' was trained on another model" in text
    assert summary.exit_code == 3
    assert summary.as_dict()["exit_code"] == 3
    assert JobSummary("x", 100, 100).exit_code == 0
    json.dumps(summary.as_dict())


def summary_text(summary: JobSummary) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_view(summary))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_summary_says_which_rows_its_tokens_belong_to() -> None:
    resumed = JobSummary(
        "x", rows=3000, rows_done=3000, rows_run=1, prompt_tokens=70, generated_tokens=2000, elapsed_s=12,
        tokens_per_s=12_345,
    )  # fmt: skip
    text = summary_text(resumed)
    assert "this run  1 row; tokens: 70 prompt, 2,000 generated; time: 0:12 (12.3k generated tok/s)" in text
    assert not re.search("^(tokens|time)", text, re.M)
    done = Snapshot(3000, 3000, 2999, tokens_per_s=12_345, elapsed_s=12, phase="done")
    assert heartbeat_line(done) == "done: 3,000 of 3,000 rows (100 %), 12.3k tok/s, 0:12 elapsed", "the same figures"


def test_a_summary_of_nothing_to_do() -> None:
    assert "3 of 3, complete before: left as it is" in summary_text(JobSummary("x", 3, 3, already_complete=True))
    empty = summary_text(JobSummary("x", 0, 0, already_complete=True, warnings=("this shard has no rows",)))
    assert "0 of 0" in empty
    assert "complete before" not in empty


def test_numbers_for_people() -> None:
    values = (0, 7.4, 999, 1000, 12_345, 99_949, 99_950, 501_000, 999_499, 999_500, 4_500_000, 2e9)
    assert [short(n) for n in values] == [
        "0", "7", "999", "1.0k", "12.3k", "99.9k", "100k", "501k", "999k", "1.0M", "4.5M", "2.0G",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 7, 754, 12_300, 185_100)] == ["0:00", "0:07", "12:34", "3:25:00", "2d 03:25"]
    assert [size(b) for b in (10, 2048, 5 << 20, 3 << 29)] == ["10 B", "2 KiB", "5 MiB", "1.5 GiB"]
    assert [kib(b) for b in (37_000, 2_834_432)] == ["36 KiB", "2,768 KiB"]
    assert [plural(n, "error") for n in (0, 1, 2000)] == ["0 errors", "1 error", "2,000 errors"]
    assert errors({"b": 1, "a": 1, "c": 5000}) == "c 5,000 · a 1 · b 1"
    assert count(1234567) == "1,234,567"
