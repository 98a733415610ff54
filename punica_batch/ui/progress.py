"""The screen of a running job, on stderr: a live one on a terminal, heartbeat lines elsewhere, nothing with ``-q``."""

from __future__ import annotations

import threading
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from punica_batch.progress import NoProgress, Progress, Snapshot, WorkerLine
from punica_batch.ui.console import error_console
from punica_batch.ui.format import count, duration, errors, short

HEARTBEAT_SECONDS = 10.0
_STATE_STYLES = {"running": "green", "starting": "yellow", "restarting": "red", "released": "dim", "done": "dim"}


def make_progress(*, quiet: bool, console: Console | None = None) -> Progress:
    """What fits stderr. A dumb terminal cannot move its cursor, so it gets lines."""
    if quiet:
        return NoProgress()
    console = console or error_console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console)
    return HeartbeatProgress(console.file)


class LiveProgress:
    """A bar, a line for each worker, errors by code; redrawn in place four times a second, notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._screen = _Screen()
        self._console = console
        self._live = Live(self._screen, console=console, refresh_per_second=4, redirect_stdout=False)
        self._live.start()

    def note(self, line: str) -> None:
        self._console.print(Text(line))

    def update(self, snapshot: Snapshot) -> None:
        self._screen.snapshot = snapshot

    def close(self) -> None:
        self._live.stop()


class HeartbeatProgress:
    """A line at the start, every ten seconds, and at the end, for logs. A thread of its own keeps the beat, so that a
    log shows life also while the job is busy reading or assembling."""

    def __init__(self, file: IO[str], interval: float = HEARTBEAT_SECONDS) -> None:
        self._file = file
        self._snapshot: Snapshot | None = None
        self._last = ""
        self._write_lock = threading.Lock()
        self._closed = threading.Event()
        self._interval = interval
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def note(self, line: str) -> None:
        self._write(line)

    def update(self, snapshot: Snapshot) -> None:
        is_first, self._snapshot = self._snapshot is None, snapshot
        if is_first:
            self._write(heartbeat_line(snapshot))

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            if self._snapshot is not None and heartbeat_line(self._snapshot) != self._last:
                self._write(heartbeat_line(self._snapshot))

    def _beat(self) -> None:
        while not self._closed.wait(self._interval):
            self._write("planning" if self._snapshot is None else heartbeat_line(self._snapshot))

    def _write(self, line: str) -> None:
        with self._write_lock:
            self._last = line
            print(line, file=self._file, flush=True)


def heartbeat_line(s: Snapshot) -> str:
    """running: 1,200 of 5,000 rows (24 %), 830 tok/s, ETA 1:05, 3 errors (overlong 3)"""
    parts = [f"{count(s.rows_done)} of {count(s.rows_total)} rows ({_percent(s):.0f} %)"]
    if s.phase == "planning" and s.rows_before:
        parts.append(f"{count(s.rows_before)} of them done before")
    if s.phase in ("running", "assembling", "done"):
        parts.append(f"{short(s.tokens_per_s)} tok/s")
    if s.phase in ("running", "checking"):
        parts.append(f"ETA {_eta(s)}")
    else:
        parts.append(f"{duration(s.elapsed_s)} elapsed")
    if s.rows_error:
        parts.append(f"{count(s.rows_error)} errors ({errors(s.errors_by_code)})")
    restarting = sum(worker.state == "restarting" for worker in s.workers)
    if restarting:
        parts.append(f"{restarting} of {len(s.workers)} workers restarting")
    return f"{s.phase}: {', '.join(parts)}"


class _Screen:
    """Draws the newest snapshot at whatever width the terminal has now."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.snapshot is None:
            yield Text("planning …", style="dim")
        else:
            yield draw(self.snapshot, options.max_width, options.max_height)


def draw(s: Snapshot, width: int, height: int = 50) -> Group:
    """The screen for ``width`` columns and at most ``height`` lines; workers that find no line are summed up."""
    lines: list[Text | Table] = [_bar(s, width), _totals(s, width)]
    if s.workers:
        lines.append(_workers(s.workers, width, max(1, height - 6)))
    if s.rows_error:
        lines.append(Text(f"{count(s.rows_error)} errors: {errors(s.errors_by_code)}", style="red"))
    return Group(*lines)


def _bar(s: Snapshot, width: int) -> Table:
    label = Text(s.phase, style="bold")
    numbers = Text(f"{count(s.rows_done)}/{count(s.rows_total)} rows {_percent(s):3.0f} %")
    eta = Text(f"ETA {_eta(s)}" if s.phase != "done" else duration(s.elapsed_s), style="cyan")
    grid = Table.grid(padding=(0, 1))
    room = width - label.cell_len - numbers.cell_len - eta.cell_len - 3
    if room < 10:
        grid.add_row(numbers, eta)
    else:
        bar = ProgressBar(total=max(1, s.rows_total), completed=s.rows_done, width=min(60, room))
        grid.add_row(label, bar, numbers, eta)
    return grid


def _totals(s: Snapshot, width: int) -> Text:
    if s.phase == "checking":
        return Text(f"{duration(s.elapsed_s)} elapsed", style="dim")
    facts = [
        f"{short(s.tokens_per_s)} tok/s",
        f"{short(s.prompt_tokens)} prompt + {short(s.generated_tokens)} generated tokens",
        f"parts {s.parts_done}/{s.parts_total}",
        f"{duration(s.elapsed_s)} elapsed",
    ]
    if s.rows_before:
        facts.append(f"{count(s.rows_before)} rows done before")
    line = facts[0]
    for fact in facts[1:]:
        if len(line) + 3 + len(fact) <= width:
            line += f" · {fact}"
    return Text(line, style="dim")


def _workers(workers: tuple[WorkerLine, ...], width: int, room: int) -> Table:
    is_wide = width >= 60
    load_headers = ("batch", "KV blocks", "adapters") if is_wide else ("batch", "KV")
    headers = ("worker", "state", *load_headers, "tok/s")
    table = Table(box=None, padding=(0, 2 if is_wide else 1, 0, 0), header_style="dim", pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in ("worker", "state") else "right", no_wrap=True)
    shown = workers if len(workers) <= room else workers[: room - 1]
    for worker in shown:
        name = Text(worker.name.removeprefix("GPU-")[:8])  # a UUID's first group tells it from its neighbours
        state = Text(worker.state, style=_STATE_STYLES[worker.state])
        table.add_row(name, state, *_load(worker, is_wide), short(worker.tokens_per_s))
    if len(shown) < len(workers):
        rest = workers[len(shown) :]
        rate = short(sum(worker.tokens_per_s for worker in rest))
        table.add_row("others", f"{len(rest)} more", *[""] * (len(headers) - 3), rate)
    return table


def _load(worker: WorkerLine, is_wide: bool) -> list[str]:
    """Batch, KV blocks and (``is_wide``) adapters; "–" before the worker's first message."""
    stats = worker.stats
    if stats is None:
        return ["–"] * (3 if is_wide else 2)
    batch = f"{stats.running}/{worker.max_num_seqs}"
    if not is_wide:
        return [batch, f"{100 * stats.kv_blocks_used / max(1, stats.kv_blocks_total):.0f} %"]
    return [batch, f"{short(stats.kv_blocks_used)}/{short(stats.kv_blocks_total)}", str(stats.adapters_resident)]


def _percent(s: Snapshot) -> float:
    """Never 100 before the end."""
    if s.rows_done >= s.rows_total:
        return 100.0
    return min(99.0, 100.0 * s.rows_done / s.rows_total)


def _eta(s: Snapshot) -> str:
    return "–" if s.eta_s is None else duration(s.eta_s)
