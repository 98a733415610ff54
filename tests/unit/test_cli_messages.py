"""What commands say of a job that is not right, and what they propose."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from job_files import CONTEXT, config_of, stay_in, write_both, write_job, write_rows

from punica_batch import cli
from punica_batch.errors import ValidationError
from punica_batch.planning.opened import open_job
from punica_batch.planning.preflight import preflight, refuse_if_too_many
from punica_batch.text.prepare import Preparer


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stay_in(tmp_path, monkeypatch)
    return write_job(tmp_path)


def test_both_columns_named_is_one_too_many(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(write_both(job))
    assert cli.execute(["validate", source]) == 4
    assert "has both 'prompt' and 'messages': say which to use with" in capsys.readouterr().err
    assert cli.execute(["validate", source, "--prompt-column", "prompt", "--messages-column", "messages"]) == 4
    err = capsys.readouterr().err
    assert "has both 'prompt' and 'messages': give only one of --prompt-column and --messages-column" in err


def test_plan_exits_0_where_run_would_stop_and_says_so_in_its_help(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.execute(["plan", str(job), "--device", "cpu", "--max-errors", "1"]) == 0
    assert "run would stop: " in capsys.readouterr().out
    cli.execute(["plan", "--help"])
    assert "Exit 0 also where it says that `run` would stop" in " ".join(capsys.readouterr().out.split())


def test_one_row_is_no_rows(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_rows(job.parent / "one.parquet", [None])
    assert cli.execute(["plan", str(one), "--device", "cpu", "--rows-per-shard", "1", "--max-tokens", "1"]) == 0
    assert cli.execute(["validate", str(one)]) == 0
    out = capsys.readouterr().out
    assert "1 row for the base model" in out
    assert "1 of 1 row would run, 0 adapters" in out
    assert not re.search(r"\b1 (rows|answers|tokens|files|parts)\b", out), out
    bad = write_rows(job.parent / "bad.parquet", ["wrong"])
    with pytest.raises(ValidationError, match="1 of 1 row would fail, --max-errors 0% of 1 row allows 0: "):
        refuse_if_too_many(preflight(open_job(config_of(bad)), 0, 1), config_of(bad, max_errors="0%"), 1)


def test_an_error_that_asks_gets_no_second_end(job: Path) -> None:
    rows = write_rows(job.parent / "x.parquet", ["god"] * 3)
    with pytest.raises(ValidationError, match=r"did you mean 'good'\? Run `punica-batch validate`"):
        refuse_if_too_many(preflight(open_job(config_of(rows)), 0, 3), config_of(rows), 3)


def test_a_longer_context_is_proposed_only_where_the_model_has_one(job: Path) -> None:
    long = write_rows(job.parent / "long.parquet", [None, None], ["hello " * (2 * CONTEXT), "hello " * 100_000])
    for length, proposed in ((None, False), (CONTEXT, False), (CONTEXT - 1, True)):
        opened = open_job(config_of(long, max_model_len=length))
        preparer = Preparer(opened.text_settings({}, {}))
        (batch,) = opened.source.work_batches(0, 2)
        for result in preparer.prepare(batch, 0).errors:
            assert result.error is not None
            assert result.error.startswith("prompt_too_long: ")
            assert ("--max-model-len" in result.error) == proposed
            assert "shorten the prompt" in result.error


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("it's 😀.csv", "prompt,lora_id\nhello,good\n", "is CSV, which is not read"),
        ("x.TSV", "prompt\tlora_id\nhello\tgood\n", "is CSV, which is not read"),
        (
            "x.json",
            '{"prompt": "hello", "lora_id": "good"}\n',
            "x.json is JSON, which is read of OpenAI Batch requests",
        ),
        ("x.jsonl", '{"prompt": "hello", "lora_id": "good"}\n', "JSON lines are read as OpenAI Batch requests"),
    ],
)
def test_files_of_other_kinds_are_refused_with_the_command_that_converts_them(
    job: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, reason: str
) -> None:
    (job.parent / name).write_text(text)
    assert cli.execute(["validate", str(job.parent / name)]) == 4
    err = capsys.readouterr().err
    assert reason in err
    assert "convert it to Parquet: python -c " in err
    _, option, code = shlex.split(err[err.index("python -c") :])
    target = (job.parent / name).with_suffix(".parquet")
    subprocess.run([sys.executable, option, code], check=True)
    assert pq.read_table(target).to_pylist() == [{"prompt": "hello", "lora_id": "good"}]
    assert cli.execute(["validate", str(job.parent / name)]) == 4
    assert "-2.parquet" in capsys.readouterr().err, "nothing that is there is replaced"


def test_no_adapters_names_every_way_to_name_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PUNICA_BATCH_ADAPTERS", raising=False)
    assert cli.execute(["adapters", "check"]) == 2
    err = capsys.readouterr().err
    for way in ("--adapters", "--lora-modules", "--config", "PUNICA_BATCH_ADAPTERS"):
        assert way in err
