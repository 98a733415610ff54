"""``punica-batch bench``: the Punica paper's measurements, and those it left out, on this machine."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from punica_batch.bench.registry import BENCHES, Bench
from punica_batch.commands.options import Verbose

if TYPE_CHECKING:
    from punica_batch import types
    from punica_batch.bench.options import BenchOptions

app = typer.Typer(
    help="Measure this machine as the Punica paper does: JSON lines and a figure each.", no_args_is_help=True
)

ModelShape = Annotated[str, typer.Option(help="7b, 8b, 13b (Llama's), or tiny, for tests.", metavar="NAME")]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16 or float32.", metavar="TYPE")]
Rank = Annotated[int, typer.Option(help="Of the adapters.", metavar="N")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer points, a bounded time.")]
Seconds = Annotated[
    float | None,
    typer.Option(help="Leave out what is not measured by then. Default: no limit, or --quick's.", metavar="S"),
]
Results = Annotated[
    Path | None,
    typer.Option(help="Folder. Default: ./benchmarks/results where it is, else ./results.", metavar="DIR"),
]
Device = Annotated[str, typer.Option(help="cuda, or cpu to try a command: its times mean nothing.", metavar="TYPE")]


def _command(benches: Sequence[Bench], summary: str) -> Callable[..., int]:
    """A command that runs ``benches`` in turn, with the options that all have."""

    def run(
        model_shape: ModelShape = "7b",
        dtype: Dtype = "float16",
        rank: Rank = 16,
        quick: Quick = False,
        seconds: Seconds = None,
        results: Results = None,
        device: Device = "cuda",
        verbose: Verbose = False,
    ) -> int:
        return _run(benches, _options(model_shape, dtype, rank, quick, seconds, results, device))

    run.__doc__ = summary
    return run


def _options(
    model_shape: str, dtype: str, rank: int, quick: bool, seconds: float | None, results: Path | None, device: str
) -> BenchOptions:
    from punica_batch.bench.options import BenchOptions, default_results

    return BenchOptions(
        model_shape=model_shape, dtype=cast("types.Dtype", dtype), rank=rank, quick=quick, device=device,
        results=results or default_results(), seconds=math.inf if seconds is None else seconds,
    )  # fmt: skip


def _run(benches: Sequence[Bench], options: BenchOptions) -> int:
    """One after the other. Of several, one that fails does not keep the others from running: exit 1 at the end; one
    that needs what is not installed is left out."""
    from punica_batch.bench.runner import check, missing, run_bench
    from punica_batch.ui.lines import write_line

    check(options)
    if len(benches) > 1:
        lacks = {bench: missing(bench) for bench in benches}
        for lack in filter(None, lacks.values()):
            write_line(f"punica-batch: left out: {lack}", sys.stderr)
        benches = [bench for bench in benches if not lacks[bench]]
    failed, seconds = [], dict[str, float]()
    for bench in benches:
        began = time.monotonic()
        try:
            run_bench(bench, options)
        except Exception as error:  # of any library
            if len(benches) == 1:
                raise
            failed.append(bench.name)
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            write_line(f"punica-batch: bench {bench.name}: {line}", sys.stderr)
        seconds[bench.name] = time.monotonic() - began
    if len(benches) > 1:
        each = ", ".join(f"{name} {took:.0f} s" for name, took in seconds.items())
        write_line(f"{each}; in all {sum(seconds.values()):.0f} s", sys.stderr)
    return 1 if failed else 0


Loads = Annotated[str | None, typer.Option(help="Of decode,chat,label. Default: all.", metavar="NAMES")]
Caps = Annotated[str | None, typer.Option(help="Rows that run at once. Default: 32,256.", metavar="N,N")]
Adapters = Annotated[
    str | None, typer.Option(help="Of none,identical,skewed,uniform,distinct. Default: all.", metavar="NAMES")
]
Ranks = Annotated[str, typer.Option(help="Of the adapters: numbers, and mix for several in a job.", metavar="N,N")]
BatchedTokens = Annotated[int | None, typer.Option(help="A step's tokens at most. Default: as a job's.", metavar="N")]
Weights = Annotated[
    str, typer.Option(help="The base model's values: normal, or vllm-dummy, as vLLM's dummy loader's.", metavar="NAME")
]


def _engine(
    model_shape: ModelShape = "7b",
    dtype: Dtype = "float16",
    loads: Loads = None,
    caps: Caps = None,
    adapters: Adapters = None,
    ranks: Ranks = "16",
    batched_tokens: BatchedTokens = None,
    weights: Weights = "normal",
    quick: Quick = False,
    seconds: Seconds = None,
    results: Results = None,
    device: Device = "cuda",
    verbose: Verbose = False,
) -> int:
    """Throughput of the engine on whole loads, each beside its limit, and where the rest goes."""
    from punica_batch.bench.runner import run_bench
    from punica_batch.bench.selection import Selection, parse_ranks

    parsed = parse_ranks(ranks)
    options = _options(model_shape, dtype, parsed[0][0], quick, seconds, results, device)
    selection = Selection.of(options).choose(
        loads=loads, caps=caps, adapters=adapters, ranks=parsed, batched_tokens=batched_tokens, weights=weights
    )
    run_bench(next(bench for bench in BENCHES if bench.name == "engine"), options, selection=selection)
    return 0


for _bench in BENCHES:
    app.command(_bench.name)(_engine if _bench.name == "engine" else _command([_bench], _bench.summary))
app.command("all")(
    _command(
        [b for b in BENCHES if b.in_all], "All but startup, scaling, tune; --quick: budgeted for 8 minutes on an H200."
    )
)


@app.command("table")
def table(
    results: Results = None,
    everything: Annotated[bool, typer.Option("--all", help="Every figure, not only the headlines.")] = False,
    verbose: Verbose = False,
) -> int:
    """Print the latest results as Markdown tables."""
    from punica_batch.bench.options import default_results
    from punica_batch.bench.table import markdown
    from punica_batch.ui.console import emit

    emit(markdown(results or default_results(), everything=everything))
    return 0


@app.command("draw")
def draw(results: Results = None, verbose: Verbose = False) -> int:
    """Draw the figures of the latest results again."""
    from punica_batch.bench.options import default_results
    from punica_batch.bench.redraw import redraw
    from punica_batch.ui.console import emit

    for path in redraw(results or default_results()):
        emit(str(path))
    return 0
