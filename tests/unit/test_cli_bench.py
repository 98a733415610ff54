"""``punica-batch bench``: every command from the command line to its figure, on the CPU with a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from matplotlib import image

from punica_batch import cli
from punica_batch.bench import runner
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.registry import BENCHES, Bench

TINY = ("--model-shape", "tiny", "--device", "cpu", "--dtype", "float32", "--rank", "4")
# command -> what it measures, and the parameters that its lines must have
MEASURED = {
    "batching": {"latency": {"phase", "rows", "length", "attention"}},
    "roofline": {"copy bandwidth": set(), "matrix product": set(), "rate": {"popularity", "rows", "intensity"}},
    "sgmv": {"latency": {"provider", "popularity", "rows"}},
    "rank": {"latency": {"ranks", "popularity", "rows"}},
    "layer": {"latency": {"popularity", "rows", "length", "attention"}},
    "ablations": {"add-on": {"variant", "popularity", "rows"}, "decode rate": {"popularity", "rows", "length"}},
}
CASES = {
    "batching": {("phase",): {("prefill",), ("decode",)}},
    "roofline": {("popularity",): {("distinct",), ("uniform",), ("skewed",), ("identical",), (None,)}},
    "sgmv": {("provider",): {("sgmv",), ("loop",), ("gather-bmm",)}},
    "rank": {("ranks",): {("1",), ("4",), ("mix",), ("1 beside 4",)}},
    "layer": {("popularity",): {("none",), ("distinct",), ("uniform",), ("skewed",), ("identical",)}},
    "ablations": {
        ("variant",): {("as it is",), ("split-K off",), ("tensor cores off",), ("tensor cores on",), (None,)}
    },
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C kernels are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUNICA_BATCH_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", MEASURED)
def test_a_command_from_end_to_end(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["bench", name, *TINY, "--results", "out"]) == 0, capsys.readouterr().err
    lines = [json.loads(text) for text in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
    for what, parameters in MEASURED[name].items():
        found = [line for line in lines if line["what"] == what]
        assert found
        assert all(set(line["parameters"]) == parameters for line in found)
    assert {line["what"] for line in lines} == set(MEASURED[name])
    for keys, cases in CASES[name].items():
        assert {tuple(line["parameters"].get(key) for key in keys) for line in lines} == cases
    for line in lines:
        assert line["median"] > 0
        assert line["limit"] is None or line["limit"] > 0
        assert (line["model_shape"], line["dtype"], line["rank"], line["device"]) == ("tiny", "float32", 4, "cpu")
        assert "mean nothing" in line["note"]
    pixels = image.imread(tmp_path / "out" / f"{name}-tiny-float32-cpu.png")
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 300
    assert pixels[..., :3].std() > 0.01


def test_it_says_in_the_end_where_everything_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And, on a CPU, once, that the times mean nothing."""
    assert cli.execute(["bench", "roofline", *TINY, "--results", "out"]) == 0
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == (
        "roofline: lines in out/roofline.jsonl, figure out/roofline-tiny-float32-cpu.png; "
        "run on the CPU to show that the command works: its times mean nothing"
    )
    assert shown.count("mean nothing") == 1
    assert (tmp_path / "out" / "roofline.jsonl").is_file()
    assert (tmp_path / "out" / "roofline-tiny-float32-cpu.png").is_file()


def test_text_generation_says_at_once_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert cli.execute(["bench", "textgen", *TINY]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "bench textgen needs peft" in error
    assert "pip install 'punica-batch[bench]'" in error
    assert not list(tmp_path.iterdir())


def test_all_leaves_out_what_cannot_run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(runner, "run_bench", lambda bench, options: ran.append(bench.name))
    assert cli.execute(["bench", "all", *TINY]) == 0
    assert ran == [bench.name for bench in BENCHES if bench.in_all and bench.name != "textgen"]
    first, _ = capsys.readouterr().err.splitlines()
    assert first.startswith("punica-batch: left out: bench textgen needs transformers")
    assert first.endswith("pip install 'punica-batch[bench]'")


def test_the_extra_has_what_the_benchmarks_need() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = {re.split("[<>=]", each)[0] for each in project["optional-dependencies"]["bench"]}
    assert extra == {"matplotlib", *(name for bench in BENCHES for name in bench.needs)}


def test_time_that_is_up_leaves_out_points_but_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["bench", "layer", *TINY, "--seconds", "0"]) == 0
    assert "20 points left out" in capsys.readouterr().err
    assert (tmp_path / "results" / "layer-tiny-float32-cpu.png").is_file()


def test_results_go_where_a_checkout_has_them(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    assert cli.execute(["bench", "roofline", *TINY, "--seconds", "0"]) == 0
    assert (tmp_path / "benchmarks" / "results" / "roofline.jsonl").is_file()


def test_table_prints_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["bench", "ablations", *TINY]) == 0
    assert cli.execute(["bench", "table"]) == 0
    shown = capsys.readouterr().out
    assert "**ablations** (CPU (times mean nothing), tiny shape, float32, rank 4" in shown
    assert "| decode rate |" in shown
    assert cli.execute(["bench", "table", "--results", "nowhere"]) == 2
    assert "no results" in capsys.readouterr().err


def test_figures_are_drawn_again_from_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("roofline", "layer"):
        assert cli.execute(["bench", name, *TINY, "--results", "out"]) == 0
    figures = sorted((tmp_path / "out").glob("*.png"))
    before = [image.imread(path) for path in figures]
    for path in figures:
        path.unlink()
    capsys.readouterr()
    assert cli.execute(["bench", "draw", "--results", "out"]) == 0
    assert sorted(capsys.readouterr().out.split()) == [f"out/{path.name}" for path in figures]
    assert all((image.imread(path) == pixels).all() for path, pixels in zip(figures, before, strict=True))


def test_one_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_bench(bench: Bench, options: BenchOptions) -> None:
        ran.append(bench.name)
        if bench.name == "sgmv":
            raise RuntimeError("kernel\nfailed")

    monkeypatch.setattr(runner, "run_bench", run_bench)
    assert cli.execute(["bench", "all", *TINY]) == 1
    assert ran == [bench.name for bench in BENCHES if bench.in_all]
    failure, seconds = capsys.readouterr().err.splitlines()
    assert failure == "punica-batch: bench sgmv: RuntimeError: kernel failed"
    assert seconds == ", ".join(f"{name} 0 s" for name in ran) + "; in all 0 s"


def test_all_is_quick_in_under_eight_minutes() -> None:
    assert (
        sum(bench.quick_seconds for bench in BENCHES if bench.in_all) < 320
    )  # the rest: imports, a last point each, figures


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [*(bench.name for bench in BENCHES), "all"])
def test_without_a_gpu_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["bench", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "needs an NVIDIA GPU" in error
    assert not list(tmp_path.glob("results/*"))


def test_without_matplotlib_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.execute(["bench", "rank", *TINY]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install 'punica-batch[bench]'" in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model-shape", "70b"], "--model-shape 70b"),
        (["--dtype", "int8"], "--dtype int8"),
        (["--rank", "0"], "--rank 0"),
        (["--device", "tpu"], "--device tpu"),
        (["--device", "cuda:x"], "--device cuda:x"),
        (["--device", "cuda:-1"], "--device cuda:-1"),
        (["--device", "cuda:256"], "--device cuda:256"),  # torch takes the number for another
        (["--device", "cpu", "--seconds", "-1"], "--seconds -1"),
        (["--device", "cpu", "--seconds", "nan"], "--seconds nan"),
    ],
)
def test_wrong_options(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sgmv", "all"):
        assert cli.execute(["bench", command, *arguments]) == 2
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--caps", "0"], "--caps 0"),
        (["--caps", "4,99999999"], "--caps 99999999"),
        (["--ranks", "0"], "--ranks 0"),
        (["--ranks", "mix,257"], "--ranks 257"),
        (["--batched-tokens", "0"], "--batched-tokens 0"),
        (["--batched-tokens", "-1"], "--batched-tokens -1"),
        (["--caps", "4,32", "--batched-tokens", "31"], "--batched-tokens 31: not from 32"),
        (["--batched-tokens", "99999999"], "--batched-tokens 99999999"),
        (["--weights", "dummy"], "--weights dummy: not one of normal, vllm-dummy"),
    ],
)
def test_wrong_options_of_the_engine(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["bench", "engine", "--model-shape", "tiny", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_a_gpu_beyond_those_there_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cli.execute(["bench", "sgmv", "--device", "cuda:2"]) == 2
    assert "--device cuda:2: torch finds 2 here" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from punica_batch.cli import execute; execute(['bench', '--help']); "
        "execute(['bench', 'sgmv', '--help']); sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert all(bench.name in done.stdout for bench in BENCHES)
    assert "--model-shape" in done.stdout
