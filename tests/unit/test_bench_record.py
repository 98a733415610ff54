"""What a benchmark leaves behind: spreads, JSON lines, the code's commit, the Markdown made of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest

from punica_batch.bench import record
from punica_batch.bench.options import BenchOptions, Budget
from punica_batch.bench.record import CPU_NOTE, Recorder, Spread
from punica_batch.bench.table import latest_runs, markdown, read_lines
from punica_batch.errors import JobError, UsageError

KEYS = {
    "schema_version", "bench", "what", "unit", "median", "p10", "p90", "n", "limit", "headline", "parameters",
    "model_shape", "dtype", "rank", "quick", "run", "device", "gpu", "driver", "note", "versions", "commit", "command",
    "time",
}  # fmt: skip


def options(results: Path, **changes: Any) -> BenchOptions:
    return BenchOptions(model_shape="tiny", dtype="float32", device="cpu", results=results, **changes)


@pytest.mark.parametrize("n", [1, 2, 5, 10, 101])
def test_spread_is_numpys(n: int) -> None:
    samples = np.random.default_rng(n).random(n).tolist()
    spread = Spread.of(samples)
    expected = np.percentile(samples, [50, 10, 90])
    np.testing.assert_allclose([spread.median, spread.p10, spread.p90], expected, rtol=1e-12)
    assert spread.n == n


def test_spread_of_rates_keeps_the_order() -> None:
    spread = Spread(2.0, 1.0, 4.0, 7)
    assert spread.scaled(10) == Spread(20.0, 10.0, 40.0, 7)
    assert spread.rate(8) == Spread(4.0, 2.0, 8.0, 7)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_lines_are_appended_with_all_that_is_needed_to_repeat_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/punica-batch", "bench", "demo", "--quick"])
    recorder = Recorder("demo", options(tmp_path / "new"))
    recorder.write("latency", "us", Spread(1.23456789, 1.0, 2.0, 25), limit=0.5, headline=True, rows=4, popularity="x")
    recorder.write("rate", "tok/s", 7.0)
    Recorder("demo", options(tmp_path / "new")).write("rate", "tok/s", 8.0)
    lines = [json.loads(text) for text in (tmp_path / "new" / "demo.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [KEYS] * 3
    first = lines[0]
    assert (first["median"], first["p10"], first["p90"], first["n"]) == (1.23457, 1.0, 2.0, 25)
    assert (first["limit"], first["headline"]) == (0.5, True)
    assert first["parameters"] == {"rows": 4, "popularity": "x"}
    assert (first["gpu"], first["driver"], first["note"]) == (None, None, CPU_NOTE)
    assert first["versions"]["torch"]
    assert first["command"] == "punica-batch bench demo --quick"
    assert [line["run"] == first["run"] for line in lines] == [True, True, False]
    assert recorder.select("latency", rows=4) == [first]
    assert recorder.select("latency", rows=5) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="--results"):
        Recorder("demo", options(tmp_path / "file" / "below"))


def test_commit_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of it goes before its own git, which may be another's; without either, the version."""
    monkeypatch.setenv("PUNICA_BATCH_COMMIT", "abc1234")
    assert record.commit() == "abc1234"
    monkeypatch.delenv("PUNICA_BATCH_COMMIT")
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    assert record.commit().startswith("version ")


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"rank": 0}, "--rank 0"), ({"rank": 257}, "--rank 257"), ({"dtype": "int8"}, "--dtype int8")],
)
def test_options_out_of_range(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        BenchOptions(**changes)
    with pytest.raises(UsageError, match="--model-shape 70b: not one of 7b, 8b"):
        BenchOptions(model_shape="70b")


def test_sizes_by_shape_and_haste() -> None:
    sizes = {"full": 3, "quick": 2, "tiny": 1}
    assert BenchOptions().pick(**sizes) == 3
    assert BenchOptions(quick=True).pick(**sizes) == 2
    assert BenchOptions(quick=True, model_shape="tiny").pick(**sizes) == 1


def test_budget() -> None:
    assert not Budget(60).is_spent
    assert Budget(0).is_spent
    assert not BenchOptions().budget().is_spent


def test_a_torn_line_is_named_and_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "demo.jsonl").write_text('{"schema_version": 1, "bench": "demo"}\nnull\n{"torn')
    Recorder("demo", options(tmp_path)).write("latency", "us", 1.0, headline=True)
    with pytest.raises(JobError, match=r"demo\.jsonl, line 3: not whole, as after a kill: delete the line"):
        markdown(tmp_path)
    lines = (tmp_path / "demo.jsonl").read_text().splitlines()
    (tmp_path / "demo.jsonl").write_text("\n".join(line for line in lines if line != '{"torn'))
    assert [line["median"] for line in read_lines(tmp_path)] == [1.0]


def test_table_shows_the_latest_run_of_each_shape(tmp_path: Path) -> None:
    for value in (10.0, 20.0):
        recorder = Recorder("demo", options(tmp_path))
        recorder.write("latency", "us", Spread(value, value - 1, value + 1, 9), limit=5.0, headline=True, rows=4)
        recorder.write("latency", "us", Spread(1234.0, 1.0, 2.0, 9), rows=8)
    Recorder("demo", options(tmp_path, rank=64)).write("decode rate", "tok/s", 900.0, limit=1000.0, headline=True)
    (tmp_path / "other.jsonl").write_text('{"what": "of another script"}\n')
    assert [[line["median"] for line in run] for run in latest_runs(read_lines(tmp_path))] == [[20.0, 1234.0], [900.0]]
    text = markdown(tmp_path)
    assert "| measured | rows | median | p10 to p90 | limit | of the limit |" in text
    assert "| latency | 4 | 20 µs | 19 to 21 | 5 | 25 % |" in text
    assert "| decode rate | 900 tok/s |  | 1,000 | 90 % |" in text
    assert "rank 64" in text
    assert "10 µs" not in text
    assert "1,234" not in text
    assert "| latency | 8 | 1,234 µs | 1 to 2 |  |  |" in markdown(tmp_path, everything=True)


def test_the_engines_table_has_the_latest_figure_of_each_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its share and the run that it is of; quick runs are not in it; its own lines are found by ``--all``."""

    def run(commit: str, quick: bool, *points: tuple[str, int, str, float]) -> None:
        monkeypatch.setenv("PUNICA_BATCH_COMMIT", commit)
        recorder = Recorder("engine", options(tmp_path, quick=quick))
        for load, cap, adapters, value in points:
            about = {"load": load, "cap": cap, "adapters": adapters, "ranks": "16"}
            unit = "rows/s" if load == "label" else "new tok/s"
            recorder.write("throughput", unit, value, limit=4000.0, headline=not quick, **about)
            recorder.write("step", "ms", value / 1000, **about)

    run("old", False, ("label", 256, "none", 100.0), ("decode", 256, "none", 1000.0), ("decode", 32, "none", 500.0))
    run("new", False, ("decode", 256, "distinct", 3000.0), ("decode", 256, "none", 2000.0))
    run("hasty", True, ("decode", 32, "none", 1.0))
    whole, quick = latest_runs(read_lines(tmp_path))
    assert sorted(x["median"] for x in whole if x["what"] == "throughput") == [100.0, 500.0, 2000.0, 3000.0]
    assert [x["median"] for x in quick if x["what"] == "throughput"] == [1.0]
    rows = [text for text in markdown(tmp_path).splitlines() if text.startswith("|")]
    assert rows == [
        "| load | batch cap | rank | unit | none | distinct |",
        "| --- | --- | --- | --- | --- | --- |",
        "| decode | 32 | 16 | new tok/s | 500 (12 %) a |  |",
        "| decode | 256 | 16 | new tok/s | 2,000 (50 %) b | 3,000 (75 %) b |",
        "| label | 256 | 16 | rows/s | 100 (2 %) a |  |",
    ]
    assert "a: commit old" in markdown(tmp_path)
    assert "| step | decode | 32 | none | 16 | 0.5 ms |" in markdown(tmp_path, everything=True)


def test_the_engines_table_keeps_weights_apart(tmp_path: Path) -> None:
    """Whichever was measured last."""
    about = {"load": "label", "cap": 256, "adapters": "none", "ranks": "16"}
    for value, parameters in ((170.0, {}), (185.0, {"weights": "vllm-dummy"}), (186.0, {"weights": "vllm-dummy"})):
        recorder = Recorder("engine", options(tmp_path), parameters=parameters)
        recorder.write("matrix product", "TFLOP/s", value)
        recorder.write("throughput", "rows/s", value, limit=200.0, headline=True, **about)
        recorder.write("throughput", "rows/s", 2 * value, limit=400.0, headline=True, **about | {"cap": 32})
    [whole] = latest_runs(read_lines(tmp_path))
    assert sorted(line["median"] for line in whole) == [170.0, 170.0, 186.0, 186.0, 340.0, 372.0]
    rows = [text for text in markdown(tmp_path).splitlines() if text.startswith("| label")]
    assert rows == [
        "| label | 32 | 16 | rows/s | 340 (85 %) a |",
        "| label | 256 | 16 | rows/s | 170 (85 %) a |",
        "| label, vllm-dummy weights | 32 | 16 | rows/s | 372 (93 %) a |",
        "| label, vllm-dummy weights | 256 | 16 | rows/s | 186 (93 %) a |",
    ]


def test_the_engines_table_has_ranks_in_their_order(tmp_path: Path) -> None:
    recorder = Recorder("engine", options(tmp_path))
    for ranks in ("64", "8+16+64", "8", "16"):
        about = {"load": "decode", "cap": 32, "adapters": "uniform", "ranks": ranks}
        recorder.write("throughput", "new tok/s", 100.0, limit=200.0, headline=True, **about)
    rows = [text.split(" | ")[2] for text in markdown(tmp_path).splitlines() if text.startswith("| decode")]
    assert rows == ["8", "8+16+64", "16", "64"]


def test_the_engines_table_has_letters_for_any_number_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cap in range(1, 29):
        monkeypatch.setenv("PUNICA_BATCH_COMMIT", f"commit{cap}")
        about = {"load": "decode", "cap": cap, "adapters": "none", "ranks": "16"}
        recorder = Recorder("engine", options(tmp_path))
        recorder.write("throughput", "new tok/s", 100.0, limit=200.0, headline=True, **about)
    text = markdown(tmp_path)
    cells = [row.split(" | ")[-1].removesuffix(" |") for row in text.splitlines() if row.startswith("| decode")]
    assert cells == [f"100 (50 %) {letters}" for letters in [*ascii_lowercase, "aa", "ab"]]
    assert "- z: commit commit26," in text
    assert "- ab: commit commit28," in text


def test_what_is_printed_of_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not more digits than mean something, no colon without what it belongs to, a limit with its unit."""
    recorder = Recorder("demo", options(tmp_path))
    recorder.write("weights", "GB/s", 6.123456)
    recorder.write("first tokens", "s", 0.5, first=0.012610058001882862, adapters=4)
    recorder.write("throughput", "new tok/s", 5688.7, limit=7690.2, load="decode")
    assert capsys.readouterr().err.splitlines() == [
        "demo: weights: 6.123 GB/s",
        "demo: first tokens, first 0.01261, adapters 4: 0.5 s",
        "demo: throughput, load decode: 5,689 new tok/s (limit 7,690 new tok/s)",
    ]
    assert recorder.lines[1]["parameters"]["first"] == 0.012610058001882862


def test_a_speedup_is_a_share_of_the_highest(tmp_path: Path) -> None:
    recorder = Recorder("scaling", options(tmp_path))
    recorder.write("speedup", "times", 1.9, limit=2.0, headline=True, workers=2, seconds=0.123456)
    assert "| speedup | 2 | 0.123 | 1.9 times |  | 2 | 95 % |" in markdown(tmp_path)


def test_the_readmes_table_is_that_of_the_results() -> None:
    root = Path(__file__).parents[2]
    tables = markdown(root / "benchmarks" / "results").split("\n\n**")
    engines = [table for table in tables if table.startswith("engine** ")]
    assert engines
    readme = (root / "README.md").read_text(encoding="utf-8")
    for table in engines:
        assert f"**{table}" in readme, "put in what `punica-batch bench table` prints"


def test_table_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no results"):
        markdown(tmp_path)
