"""What a benchmark leaves behind: a JSON line a measured figure, with all that is needed to judge or repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from punica_batch.bench.options import SCHEMA_VERSION, BenchOptions, Budget
from punica_batch.errors import JobError
from punica_batch.types import JsonDict

T = TypeVar("T")

CPU_NOTE = "run on the CPU to show that the command works: its times mean nothing"
_PACKAGES = ("torch", "triton", "flashinfer-python", "vllm", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of ``n`` samples: the median, and the 10th and 90th percentiles between the nearest samples."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Raises ``ValueError`` when there are no samples."""
        ordered = sorted(samples)
        if not ordered:
            raise ValueError("no samples")
        return cls(statistics.median(ordered), percentile(ordered, 10), percentile(ordered, 90), len(ordered))

    def scaled(self, factor: float) -> Spread:
        """In another unit; a factor above 0."""
        return Spread(self.median * factor, self.p10 * factor, self.p90 * factor, self.n)

    def rate(self, amount: float) -> Spread:
        """Of times in seconds: ``amount`` a second. The slowest times are the lowest rates."""
        return Spread(amount / self.median, amount / self.p90, amount / self.p10, self.n)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted samples, linear between the two nearest (numpy's default)."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(slots=True)
class Recorder:
    """One run of one benchmark: appends to ``results/<name>.jsonl`` as figures come, and keeps them for the drawing.

    ``lines`` holds what this run has written; ``draw(recorder)`` of the benchmark's module needs nothing else.
    ``parameters`` are in every line. Raises ``JobError`` when the folder cannot be written to.
    """

    name: str
    options: BenchOptions
    lines: list[JsonDict] = field(default_factory=list)
    parameters: JsonDict = field(default_factory=dict)
    _about: JsonDict | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        try:
            self.options.results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(f"{self.options.results}: {error.strerror}: choose another folder by --results") from error

    @classmethod
    def of_run(cls, lines: list[JsonDict], results: Path) -> Recorder:
        """That of a run which has ended, by its lines (one at least), to draw its figure again."""
        first = lines[0]
        options = BenchOptions(
            model_shape=first["model_shape"], dtype=first["dtype"], rank=first["rank"], quick=first["quick"],
            device=first["device"], results=results,
        )  # fmt: skip
        return cls(first["bench"], options, lines)

    @property
    def figure_path(self) -> Path:
        return figure_path(self.name, self.options)

    def write(
        self,
        what: str,
        unit: str,
        value: Spread | float,
        *,
        limit: float | None = None,
        headline: bool = False,
        **parameters: Any,
    ) -> JsonDict:
        """Appends one figure and returns its line.

        ``what`` was measured, in ``unit`` (``value`` and ``limit`` alike), at ``parameters`` (scalars); a plain number
        has no spread. ``limit``: by the device's measured ceilings. ``headline``: the README shows it.
        """
        if self._about is None:
            options = self.options
            self._about = {
                "model_shape": options.model_shape, "dtype": options.dtype, "rank": options.rank,
                "quick": options.quick, "run": uuid.uuid4().hex[:12], **environment(options.device),
            }  # fmt: skip
        spread = value if isinstance(value, Spread) else Spread(value, value, value, 1)
        line = {
            "schema_version": SCHEMA_VERSION, "bench": self.name, "what": what, "unit": unit,
            "median": _rounded(spread.median), "p10": _rounded(spread.p10), "p90": _rounded(spread.p90),
            "n": spread.n, "limit": None if limit is None else _rounded(limit), "headline": headline,
            "parameters": parameters | self.parameters, **self._about,
        }  # fmt: skip
        path = lines_path(self.name, self.options)
        try:
            with path.open("ab+") as file:
                if file.tell() and not _ends_line(file):  # torn by a kill
                    file.write(b"\n")
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise JobError(f"{path}: {error.strerror}: choose another folder by --results") from error
        self.lines.append(line)
        print(f"{self.name}: {_summary(line)}", file=sys.stderr, flush=True)
        return line

    def in_time(self, points: Iterable[T], budget: Budget) -> Iterator[T]:
        """Those of ``points`` that come up before the time is up; says how many do not."""
        left_out = 0
        for point in points:
            if budget.is_spent:
                left_out += 1
            else:
                yield point
        self.skipped(left_out)

    def skipped(self, points: int, why: str = "the time is up") -> None:
        """Says that ``points`` were left out, if any, and why."""
        if points:
            print(f"{self.name}: {points} points left out: {why}", file=sys.stderr, flush=True)

    def select(self, what: str, **parameters: Any) -> list[JsonDict]:
        """This run's lines of that kind with those parameters, in the order of their writing."""
        wanted = parameters.items()
        return [x for x in self.lines if x["what"] == what and wanted <= x["parameters"].items()]


def lines_path(name: str, options: BenchOptions) -> Path:
    """Of the JSON lines of benchmark ``name``."""
    return options.results / f"{name}.jsonl"


def figure_path(name: str, options: BenchOptions) -> Path:
    """Of the PNG beside the JSON lines, by shape and dtype: another shape's figure stays."""
    cpu = "-cpu" if options.device == "cpu" else ""
    return options.results / f"{name}-{options.model_shape}-{options.dtype}{cpu}.png"


def environment(device: str) -> JsonDict:
    """The machine, the software and the command line of this process; the same keys on every machine."""
    is_gpu = device != "cpu"
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if is_gpu else None,
        "driver": _driver() if is_gpu else None,
        "note": None if is_gpu else CPU_NOTE,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "commit": commit(),
        "command": " ".join(["punica-batch", *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """Of the code that runs: ``PUNICA_BATCH_COMMIT``, for a copy whose git is not there or is another's; git's, with
    ``-dirty`` where tracked files differ; else the package's version."""
    if named := os.environ.get("PUNICA_BATCH_COMMIT"):
        return named
    folder = Path(__file__).parent
    described = _git(folder, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty")
    # not that of another project around it
    if described and _git(folder, "ls-files", "--error-unmatch", "../__init__.py"):
        return described
    return f"version {_version('punica-batch') or 'unknown'}"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _ends_line(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _rounded(value: float) -> float:
    """Six significant digits: more than any of these is known to."""
    return float(f"{value:.6g}")


def _summary(line: JsonDict) -> str:
    """As in ``throughput, load decode, cap 32: 5,689 new tok/s (limit 7,690 new tok/s)``."""
    named = [f"{key} {_short(value)}" for key, value in line["parameters"].items()]
    limit = "" if line["limit"] is None else f" (limit {_short(line['limit'])} {line['unit']})"
    return f"{', '.join([line['what'], *named])}: {_short(line['median'])} {line['unit']}{limit}"


def _short(value: object) -> str:
    """Numbers with a fraction by four significant digits, and all of those before the point."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
