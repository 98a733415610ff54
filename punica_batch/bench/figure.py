"""Drawing a benchmark's figure as PNG. matplotlib is an extra: ``pip install 'punica-batch[bench]'``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from punica_batch.bench.record import CPU_NOTE, Recorder
from punica_batch.errors import UsageError
from punica_batch.types import JsonDict

# One colour a popularity in every figure; the limit is always black and dashed.
COLOURS = {"none": "#7f7f7f", "identical": "#1f77b4", "skewed": "#2ca02c", "uniform": "#ff7f0e", "distinct": "#d62728"}
_DPI = 130


def require_matplotlib() -> None:
    """Raises ``UsageError`` before a long run rather than at its end."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UsageError(
            "bench draws with matplotlib, which is not installed: pip install 'punica-batch[bench]'"
        ) from error
    mpl.use("Agg")


@contextmanager
def figure(recorder: Recorder, title: str, columns: int = 1) -> Iterator[list[Any]]:
    """Gives ``columns`` axes side by side and saves them as ``recorder.figure_path`` in the end.

    Below them: the machine, the versions, the commit. Raises ``UsageError`` without matplotlib.
    """
    require_matplotlib()
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(1, columns, figsize=(5.2 * columns + 0.8, 4.6), squeeze=False, layout="constrained")
    try:
        yield list(axes[0])
        options = recorder.options
        drawing.suptitle(f"{title}\n{options.model_shape} shape, {options.dtype}", fontsize=11)
        drawing.supxlabel(_machine(recorder.lines), fontsize=7, color="#555555")
        drawing.savefig(recorder.figure_path, dpi=_DPI)
    finally:
        pyplot.close(drawing)


def curve(axes: Any, lines: Sequence[JsonDict], x: str, label: str, **style: Any) -> None:
    """The lines' medians over parameter ``x``, with a band from p10 to p90."""
    if not lines:
        return
    xs = [line["parameters"][x] for line in lines]
    (drawn,) = axes.plot(xs, [line["median"] for line in lines], marker="o", markersize=3.5, label=label, **style)
    axes.fill_between(
        xs, [line["p10"] for line in lines], [line["p90"] for line in lines], color=drawn.get_color(), alpha=0.2, lw=0
    )


def limit_curve(axes: Any, lines: Iterable[JsonDict], x: str, label: str = "limit of the device", **style: Any) -> None:
    """The lines' limits over parameter ``x``: what the measured ceilings allow."""
    points = [(line["parameters"][x], line["limit"]) for line in lines if line["limit"] is not None]
    if points:
        axes.plot(
            *zip(*points, strict=True), **({"color": "black", "linestyle": "--", "lw": 1, "label": label} | style)
        )


def log_axes(axes: Any, *, x: bool = True, y: bool = True) -> None:
    """Powers of two along x with plain numbers, powers of ten along y."""
    if x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if y:
        axes.set_yscale("log")


def finish(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _machine(lines: Sequence[JsonDict]) -> str:
    if not lines:
        return "nothing was measured"
    line = lines[0]
    versions = line["versions"]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return f"{line['gpu'] or CPU_NOTE}, torch {versions['torch']}, {commits}, {line['time'][:10]}"
