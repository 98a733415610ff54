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
from punica_batch.ui.format import count, duration, errors, plural, short
from punica_batch.ui.lines import folded, write_line

HEARTBEAT_SECONDS = 10.0
_LOG_PHASES = {"starting": "starting (loading the model)"}
# How a second signal is given, by what the first was; after --max-runtime nobody stands by to give one.
_AGAIN = {"SIGINT": "Ctrl-C again ends at once", "SIGTERM": "a second signal ends at once"}
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
        # Folded here, since rich would also break words and a terminal does nothing else.
        self._console.print(Text(folded(line, self._console.width)), soft_wrap=True)

    def update(self, snapshot: Snapshot) -> None:
        self._screen.snapshot = snapshot

    def close(self) -> None:
        self._live.transient = self._screen.snapshot is None  # what ended in its planning leaves no screen behind
        self._live.stop()


class HeartbeatProgress:
    """A line at each phase's start and every ten seconds, for logs. A thread of its own keeps the beat, so that a log
    shows life also while the job is busy reading or assembling."""

    def __init__(self, file: IO[str], interval: float = HEARTBEAT_SECONDS) -> None:
        self._file = file
        self._snapshot: Snapshot | None = None
        self._last = ""
        self._write_lock = threading.Lock()
        self._closed = threading.Event()
        self._interval = interval
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def note(self, line: str) -> None:
        self._write(line)

    def update(self, snapshot: Snapshot) -> None:
        before, self._snapshot = self._snapshot, snapshot
        if before is None or before.phase != snapshot.phase:
            self._write(heartbeat_line(snapshot))

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()  # not to wake up while the interpreter ends
            if self._snapshot is not None and heartbeat_line(self._snapshot) != self._last:
                self._write(heartbeat_line(self._snapshot))

    def _beat(self) -> None:
        while not self._closed.wait(self._interval):
            self._write("planning" if self._snapshot is None else heartbeat_line(self._snapshot))

    def _write(self, line: str) -> None:
        with self._write_lock:
            self._last = line
            write_line(line, self._file)


def heartbeat_line(s: Snapshot) -> str:
    """running: 1,200 of 5,000 rows (24 %), 830 tok/s (average 790), ETA 1:05, 3 errors (overlong 3)"""
    parts = [f"{count(s.rows_done)} of {count(s.rows_total)} rows ({_percent(s):.0f} %)"]
    if s.phase == "planning" and s.rows_before:
        parts.append(f"{count(s.rows_before)} of them done before")
    if s.phase == "done" or (s.generated_tokens and s.phase in ("running", "stopping", "stopped")):
        parts.append(_rate(s))
    parts.append(_left(s))
    if s.rows_error:
        parts.append(f"{plural(s.rows_error, 'error')} ({errors(s.errors_by_code)})")
    restarting = sum(worker.state == "restarting" for worker in s.workers)
    if restarting:
        parts.append(f"{restarting} of {plural(len(s.workers), 'worker')} restarting")
    reason = f" ({s.stop_reason})" if s.stop_reason else ""
    parts += _again(s)
    return f"{_LOG_PHASES.get(s.phase, s.phase)}{reason}: {', '.join(parts)}"


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
        lines.append(Text(f"{plural(s.rows_error, 'error')}: {errors(s.errors_by_code)}", style="red"))
    return Group(*lines)


def _bar(s: Snapshot, width: int) -> Table:
    label = Text(s.phase, style="bold yellow" if s.phase in ("stopping", "stopped") else "bold")
    numbers = Text(f"{count(s.rows_done)}/{count(s.rows_total)} rows {_percent(s):3.0f} %")
    left = Text(_left(s), style="cyan")
    grid = Table.grid(padding=(0, 1))
    room = width - label.cell_len - numbers.cell_len - left.cell_len - 3
    if room < 10:
        grid.add_row(numbers, left)
    else:
        bar = ProgressBar(total=max(1, s.rows_total), completed=s.rows_done, width=min(60, room))
        grid.add_row(label, bar, numbers, left)
    return grid


def _totals(s: Snapshot, width: int) -> Text:
    """As many facts as there is room for, the most important first."""
    facts = _again(s)
    if s.phase in ("running", "stopping", "assembling", "done", "stopped"):
        facts += [
            _rate(s),
            f"{short(s.prompt_tokens)} prompt + {short(s.generated_tokens)} generated tokens",
        ]
    elif s.phase == "starting":
        facts.append("loading the model")
    if not _left(s).endswith("elapsed"):
        facts.append(f"{duration(s.elapsed_s)} elapsed")
    if s.parts_total:
        facts.append(f"parts {s.parts_done}/{s.parts_total}")
    if s.rows_before:
        facts.append(f"{plural(s.rows_before, 'row')} done before")
    line = ""
    for fact in facts:
        joined = f"{line} · {fact}" if line else fact
        if len(joined) <= width:
            line = joined
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


def _left(s: Snapshot) -> str:
    """What is left of the phase where that can be told, else the time since the start."""
    if s.phase in ("running", "checking"):
        return f"ETA {'–' if s.eta_s is None else duration(s.eta_s)}"
    if s.grace_s is not None:
        return f"{s.grace_s:.0f} s of grace left"
    return f"{duration(s.elapsed_s)} elapsed"


def _rate(s: Snapshot) -> str:
    """Of late and over the whole run; at the end they are the same."""
    average = "" if s.phase in ("done", "stopped") else f" (average {short(s.mean_tokens_per_s)})"
    return f"{short(s.tokens_per_s)} tok/s{average}"


def _again(s: Snapshot) -> list[str]:
    return [_AGAIN[s.stop_reason]] if s.stop_reason in _AGAIN else []
