"""Does a job stay small when its rows do not? Memory, disk, time to the first row and rows a second, by input size.

    python benchmarks/million_rows.py [--rows 200000 2000000] [--adapters 300] [--row-group 100000 | --one-row-group]
                                      [--engine real|stub] [--max-tokens 2] [--max-loras N] [--folder DIR]

Runs ``punica-batch run`` on a tiny random Llama with rank-2 adapters scattered at random over the rows, one job after
the other, and samples its processes. The model computes next to nothing, so what is measured is everything else.
``--engine stub`` replaces the engine by one that answers at once: then the parent and the text worker are the limit.
The engine runs on one thread: more would only wait for each other. CPU microseconds a row hold on a busy machine, too;
rows a second only on a quiet one (``load`` is recorded). Appends to ``benchmarks/results/million_rows.jsonl`` and
prints a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from scale_input import make_adapters, make_model, write_rows
from scale_run import run_watched, summary

RESULTS = Path(__file__).parent / "results" / "million_rows.jsonl"


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="million-rows-") as folder:
        make_model(Path(folder) / "model")
        names = make_adapters(Path(folder) / "adapters", args.adapters)
        results = [_measure(Path(folder), rows, names, args) for rows in args.rows]
    _report(results)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--adapters", type=int, default=300)
    parser.add_argument("--row-group", type=int, default=100_000)
    parser.add_argument("--one-row-group", action="store_true")
    parser.add_argument("--engine", choices=("real", "stub"), default="real")
    parser.add_argument("--max-tokens", type=int, default=2, help="each row gets 1 to so many, at random")
    parser.add_argument("--max-loras", type=int, help="fewer slots than the memory plan gives")
    parser.add_argument("--folder", type=Path, help="where input and output lie meanwhile")
    return parser.parse_args()


def _measure(folder: Path, rows: int, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    source, output = folder / f"{rows}.parquet", folder / f"{rows}.out.parquet"
    write_rows(
        source, rows, names, max_tokens=args.max_tokens, row_group_rows=None if args.one_row_group else args.row_group
    )
    arguments = [
        "run", str(source), "--model", str(folder / "model"), "--adapters", str(folder / "adapters"),
        "--device", "cpu", "--ignore-eos",
    ]  # fmt: skip
    if args.max_loras is not None:
        arguments += ["--max-loras", str(args.max_loras)]
    watched = run_watched(arguments, output, engine=args.engine)
    if watched.code != 0:
        sys.exit(f"the run ended with {watched.code}: {watched.stderr[-2000:]}")
    assert pq.read_metadata(output).num_rows == rows
    source.unlink()
    output.unlink()
    result = {
        "what": "million_rows",
        "engine": args.engine,
        "adapters": args.adapters,
        "max_loras": args.max_loras,
        "max_tokens": args.max_tokens,
        "row_groups": 1 if args.one_row_group else -(-rows // args.row_group),
        **summary(watched, rows),
        "python": platform.python_version(),
        "commit": _commit(),
        "command": _command(args),
    }
    print(json.dumps(result), flush=True)
    return result


def _command(args: argparse.Namespace) -> str:
    """As it was given, without the folder, which is this machine's own."""
    words = " ".join(["python", "benchmarks/million_rows.py", *sys.argv[1:]])
    return words.replace(f" --folder {args.folder}", "")


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def _report(results: list[dict[str, Any]]) -> None:
    names = [name for name in results[0] if name not in ("what", "command", "commit", "python")]
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}", *(f"{result.get(name)!s:>14}" for result in results))


if __name__ == "__main__":
    main()
