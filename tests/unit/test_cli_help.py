"""``--help`` and the flags: all that are promised, none that is not there yet, and light to ask for."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from cli_process import process

from punica_batch import cli
from punica_batch.commands.options import FLAGS
from punica_batch.config import JobConfig

ABSENT = ("--tensor-parallel-size", "--labels", "--label", "--probe", "--deterministic")
CONTRACT_FLAGS = (
    "--model", "--revision", "--tokenizer", "--dtype", "--adapters", "--lora-modules", "--max-loras", "--max-lora-rank",
    "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization", "--block-size",
    "--kv-cache-dtype", "--temperature", "--top-p", "--top-k", "--min-p", "--max-tokens", "--stop", "--seed", "--n",
    "--logprobs", "--ignore-eos", "--chat-template", "--apply-chat-template", "--limit", "--config", "--gpus",
    "--prompt-column", "--lora-column", "--id-column", "--messages-column", "--prompt-template", "--columns",
    "--output-prefix", "--on-error", "--max-errors", "--overlong", "--rows-per-shard", "--shard", "--overwrite",
    "--pack", "--storage-option", "--grace", "--max-runtime", "--work-dir", "--json", "-q", "-v", "--device",
    "--workers", "-o",
)  # fmt: skip


def test_help_lists_the_promised_flags_and_no_later_ones() -> None:
    shown = process("run", "--help", env={**os.environ, "COLUMNS": "200"}).stdout
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", shown))
    assert set(CONTRACT_FLAGS) <= listed
    assert not listed & set(ABSENT)


@pytest.mark.parametrize("flag", ABSENT)
def test_later_flags_are_refused_not_ignored(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["run", "x.parquet", flag, "2"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_the_nearest_flag_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["run", "x.parquet", "--max-token", "3"]) == 2
    assert "No such option: --max-token; did you mean --max-tokens?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["score", "simulate", "bench", "report"])
def test_later_commands_are_absent(command: str) -> None:
    assert cli.execute([command, "x"]) == 2


def test_every_field_of_a_job_has_one_flag() -> None:
    fields = [flag.field for flag in FLAGS]
    assert len(set(fields)) == len(fields)
    assert set(fields) | {"inputs"} == set(JobConfig.model_fields)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run", "punica-batch.toml beside the input"),
        ("doctor", "Default: punica-batch.toml in the current folder"),
        ("adapters ls", "Default: punica-batch.toml in the current folder"),
        ("adapters check", "Default: punica-batch.toml in the current folder"),
        ("status", "is not read"),
        ("retry", "is not read"),
    ],
)
def test_help_says_where_a_job_file_is_looked_for(
    command: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cli.execute([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert expected in out
    assert ("beside the input" in out) == (command == "run")


def test_help_of_a_retry_says_what_its_options_mean_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cli.execute(["retry", "--help"])
    out = capsys.readouterr().out
    assert "Registry in place of the run's; --lora-modules adds to that one." in out
    assert "Of an unfinished output: stop when more rows than this fail in all." in out
    assert {"--model", "--revision", "--tokenizer"} <= set(re.findall(r"--[a-z-]+", out))
    assert not {"--overwrite", "--output", "--limit", "--prompt-column"} & set(re.findall(r"--[a-z-]+", out))


def test_help_is_light() -> None:
    """What may never be imported for --help; the time is printed, not asserted: machines differ."""
    heavy = (
        "torch",
        "pyarrow",
        "tokenizers",
        "punica_batch.config",
        "transformers",
        "jinja2",
        "numpy",
        "fsspec",
        "safetensors",
    )
    code = (
        "import sys, time; began = time.perf_counter()\n"
        "from punica_batch import cli\n"
        "code = cli.execute(['run', '--help'])\n"
        f"print([name for name in {heavy} if name in sys.modules], code, file=sys.stderr)\n"
        "print(f'{time.perf_counter() - began:.3f} s', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    print(done.stderr)
    assert done.stderr.splitlines()[0] == "[] 0"
    assert "--gpu-memory-utilization" in done.stdout


def test_no_command_imports_torch() -> None:
    code = (
        "import sys\n"
        "import punica_batch.planning.overview, punica_batch.planning.validation\n"
        "import punica_batch.planning.status, punica_batch.planning.adapters, punica_batch.ui.table\n"
        "import punica_batch.commands.doctor\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["--version"]) == 0
    assert re.fullmatch(r"punica-batch \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
