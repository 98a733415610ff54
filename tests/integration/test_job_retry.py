"""What a job says of rows that failed and of rows that could name no adapter, and that its advice works as printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_tools import MODEL, SAMPLE, Ended, Job, make_rows

FAKE = {"JOB_TEST_ENGINE": "fake"}
NOTHING = "no error rows: nothing to retry"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A registry ``adapters`` of two good adapters and one whose weights are cut."""
    for name in ("one", "two", "cut"):
        shutil.copytree(SAMPLE / "adapters" / "topic", tmp_path / "adapters" / name)
    weights = tmp_path / "adapters" / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    return tmp_path


def write(folder: Path, names: list[str | None]) -> None:
    """Rows of these adapters, in turn."""
    rows = make_rows(60).select(["id", "prompt"])
    pq.write_table(
        rows.append_column("lora_id", pa.array([names[i % len(names)] for i in range(60)])), folder / "rows.parquet"
    )


def job_of(folder: Path, *options: str) -> Job:
    options = ("--rows-per-shard", "25", *options)
    return Job(folder, "x.parquet", options=options, env=FAKE, adapters=folder / "adapters")


def repair(folder: Path) -> None:
    shutil.copy(SAMPLE / "adapters" / "topic" / "adapter_model.safetensors", folder / "adapters" / "cut")


def as_printed(job: Job, text: str) -> Ended:
    """Runs the retry that ``text`` proposes, on the CPU."""
    found = re.search(r"punica-batch (retry \S+)", text)
    assert found, text
    words = shlex.split(found[1].strip("`"))
    assert words[1] == str(job.out)
    return replace(job, command="retry").run_quick("-q")


def test_error_rows_name_the_command_that_runs_them_again(folder: Path) -> None:
    write(folder, ["one", "one", "cut"])
    job = job_of(folder, "--max-errors", "50%")
    for _ in range(2):  # and when it was complete before
        ended = job.run_quick("-q")
        assert ended.code == 3, ended.stderr
        assert f"punica-batch retry {job.out} " in ended.stdout
    again = as_printed(job, ended.stdout)
    assert again.code == 3
    assert "punica-batch retry" not in again.stdout, "what it has just done"
    assert NOTHING not in again.stdout
    repair(folder)
    assert as_printed(job, ended.stdout).code == 0
    done = replace(job, command="retry").run_quick("-q")
    assert done.code == 0
    assert NOTHING in done.stdout
    assert "left as it is" in job.run_quick("-q").stdout


def write_registry(folder: Path, template: str) -> None:
    """A registry of ``one`` and ``sick``, whose chat template is ``template``."""
    path = f'path = "{SAMPLE}/adapters/topic"\n'
    (folder / "r.toml").write_text(f"[adapters.one]\n{path}[adapters.sick]\n{path}chat_template = '{template}'\n")


RAISES, MENDED = '{{ raise_exception("no") }}', "{{ messages[0].content }}"


def test_after_too_many_errors_the_advice_works(folder: Path) -> None:
    """A retry runs the failed rows, and those that were not reached."""
    write(folder, ["one", "one", "sick"])
    write_registry(folder, RAISES)
    job = replace(job_of(folder, "--max-errors", "5"), adapters=folder / "r.toml")
    ended = job.run_quick("-q")
    assert ended.code == 1, ended.stderr
    assert "template_failed" in ended.last_line
    assert "What is done is kept: rows that failed stay so." in ended.last_line
    assert f"`punica-batch retry {job.out}` runs these rows and the rest" in ended.last_line
    retried = as_printed(job, ended.last_line)
    assert retried.code == 1, "of an unfinished output --max-errors holds for a retry, too"
    assert "--max-errors 5% of 60 rows allows 3" in retried.last_line
    write_registry(folder, MENDED)
    assert as_printed(job, ended.last_line).code == 0
    assert job.table()["error"].null_count == 60


def test_raise_tries_its_row_anew_and_so_does_a_retry_that_raises(folder: Path) -> None:
    write(folder, ["one", "sick"])
    write_registry(folder, RAISES)
    job = replace(job_of(folder, "--max-errors", "90%"), adapters=folder / "r.toml")
    assert job.run_quick("-q").code == 3
    for _ in range(2):
        stopped = replace(job, command="retry").run_quick("-q", "--on-error", "raise")
        assert stopped.code == 1, stopped.stderr
        assert "mend the cause, then run the same command again, which tries that row anew" in stopped.last_line
    write_registry(folder, MENDED)
    assert replace(job, command="retry").run_quick("-q", "--on-error", "raise").code == 0
    assert job.table()["error"].null_count == 60


def test_an_input_without_the_adapters_column_is_warned_of_at_the_end_and_ever_after(folder: Path) -> None:
    pq.write_table(make_rows(10).select(["prompt"]), folder / "rows.parquet")
    job = job_of(folder)
    for options in (["--json", "-q"], ["--json", "-q"]):
        ended = job.run_quick(*options)
        (warning,) = json.loads(ended.stdout)["warnings"]
        assert warning.startswith("adapters are configured, but the input has no column 'lora_id'. All rows use")
    for command in ("run", "retry"):
        assert f"warning: {warning}" in replace(job, command=command).run_quick("-q").stdout


def test_warnings_of_adapters_are_in_the_summary_too(folder: Path) -> None:
    write(folder, ["one"])
    config = folder / "adapters" / "one" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 0}))
    summary = json.loads(job_of(folder).run_quick("--json", "-q").stdout)
    assert any("lora_alpha" in line and "'one'" in line for line in summary["warnings"]), summary["warnings"]


def test_a_retry_names_only_what_it_has(folder: Path) -> None:
    """A model that has moved, an input that has changed or lost a column."""
    write(folder, ["one", "cut"])
    shutil.copytree(MODEL, folder / "model")
    job = replace(job_of(folder, "--max-errors", "90%"), model=folder / "model")
    assert job.run_quick("-q").code == 3
    retry = replace(job, command="retry")
    shutil.move(folder / "model", folder / "moved")
    moved = retry.run_quick("-q")
    assert moved.code == 4
    assert "give --model" in moved.last_line
    assert retry.run_quick("-q", "--model", str(folder / "moved")).code == 3
    kept = (folder / "rows.parquet").read_bytes()
    for content in (kept, None):
        if content is None:
            pq.write_table(make_rows(60).select(["id"]), folder / "rows.parquet")
        else:
            (folder / "rows.parquet").write_bytes(content)
        changed = retry.run_quick("-q", "--model", str(folder / "moved"))
        assert changed.code == 4
        assert "A retry needs" in changed.last_line
        assert "another -o" not in changed.last_line
        assert "`run --overwrite`" in changed.last_line
        again = replace(job, model=folder / "moved").run_quick("-q")
        assert again.code == 4, "run is as strict, but has other ways out"
