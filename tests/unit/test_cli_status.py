"""``status`` and the job that ``retry`` takes from an output's plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_files import stay_in, write_job

from punica_batch import cli
from punica_batch.config import JobConfig
from punica_batch.config_sources import load_config
from punica_batch.data.source import Source
from punica_batch.data.state import JobState
from punica_batch.errors import RowError
from punica_batch.planning.retry import retry_command, retry_config
from punica_batch.planning.status import OutputStatus, output_status
from punica_batch.types import Completion, FinishReason, RowResult


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stay_in(tmp_path, monkeypatch)
    return write_job(tmp_path)


def config_of(job: Path, **flags: Any) -> JobConfig:
    return load_config([str(job)], {"output": "x.parquet", "rows_per_shard": 30, **flags}, environ={})


def open_state(config: JobConfig) -> JobState:
    return JobState.open(config, {"model_sha256": "m"}, source=Source.open(config))


def good(row: int, samples: int = 1) -> RowResult:
    answer = Completion((1, 2), "a", FinishReason.STOP)
    return RowResult(row, prompt_tokens=3, completions=(answer,) * samples)


def bad(row: int) -> RowResult:
    return RowResult.failed(row, RowError("null_prompt", "column 'prompt' is null"))


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_status_takes_folder_and_store_options_from_the_job_file_that_is_named(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag goes before the file; a ``punica-batch.toml`` that is only there does not count."""
    with open_state(config_of(job)):
        pass
    report = output_status("x.parquet", None, {})
    asked: list[tuple[object, ...]] = []

    def output_status_of(*arguments: object) -> OutputStatus:
        asked.append(arguments)
        return report

    monkeypatch.setattr("punica_batch.planning.status.output_status", output_status_of)
    text = 'work_dir = "w"\n[storage_options]\nanon = "true"\nkey = "file"\n'
    Path("jobs").mkdir()
    for name in ("jobs/named.toml", "punica-batch.toml"):
        Path(name).write_text(text)
    assert cli.execute(["status", "x.parquet", "--config", "jobs/named.toml", "--storage-option", "key=flag"]) == 0
    assert cli.execute(["status", "x.parquet"]) == 0
    assert asked == [("x.parquet", "jobs/w", {"anon": "true", "key": "flag"}), ("x.parquet", None, {})]
    Path("jobs/named.toml").write_text("work_dri = 1\n")
    assert cli.execute(["status", "x.parquet", "--config", "jobs/named.toml"]) == 4


@pytest.mark.parametrize("samples", [None, 2])
def test_status_counts_parts_and_journal_without_touching_them(
    job: Path, capsys: pytest.CaptureFixture[str], samples: int | None
) -> None:
    config = config_of(job, n=samples)
    rows = [bad(row) if row in (7, 40) else good(row, samples or 1) for row in (*range(30), *range(35, 45))]
    with open_state(config) as state:
        state.journal.append(rows)
        state.journal.sync()
        state.commit_ready()
        before = files_of(job.parent / "x.parquet.punica")
        status = output_status("x.parquet", None, {})
        assert files_of(job.parent / "x.parquet.punica") == before
        assert status.running
        assert (status.slices[0].holder or "").startswith("process ")
        assert cli.execute(["status", "x.parquet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = {
        "schema_version": 1, "finished": False, "running": True, "overwriting": False, "rows": 100, "rows_done": 40,
        "journalled": 10, "parts": 4, "parts_done": 1, "rows_error": 2, "errors_by_code": {"null_prompt": 2},
        "prompt_tokens": 29 * 3, "completion_tokens": 29 * 2 * (samples or 1),
    }  # fmt: skip
    assert {name: report[name] for name in expected} == expected
    assert not output_status("x.parquet", None, {}).running
    assert cli.execute(["status", "x.parquet"]) == 0
    out = capsys.readouterr().out
    assert "not finished: run it again to continue" in out
    assert "40 of 100 (40 %), 10 of them not yet in a part" in out
    assert "2 (null_prompt 2)" in out


def test_a_row_that_went_well_later_is_no_error(job: Path) -> None:
    config = config_of(job)
    with open_state(config) as state:
        state.journal.append([bad(3)])
    with JobState.open(config, {"model_sha256": "m"}, source=Source.open(config), forget_errors=True) as state:
        state.journal.append([good(3)])
    (whole,) = output_status("x.parquet", None, {}).slices
    assert (whole.rows_done, whole.errors_by_code) == (1, {})


def test_a_torn_journal_and_commits_are_read_up_to_the_tear(job: Path) -> None:
    config = config_of(job)
    with open_state(config) as state:
        state.journal.append([good(row) for row in range(35)])
        state.commit_ready()
    folder = job.parent / "x.parquet.punica"
    (segment,) = folder.rglob("*.seg")
    for path in (segment, folder / "commits"):
        with path.open("ab") as file:
            file.write(b"torn")
    before = files_of(folder)
    (whole,) = output_status("x.parquet", None, {}).slices
    assert (whole.rows_done, whole.parts_done) == (35, 1)
    assert files_of(folder) == before


def test_a_finished_output_and_one_that_is_made_anew(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_state(config_of(job)) as state:
        state.journal.append([good(row) for row in range(100)])
        state.commit_ready()
        state.finish()
    status = output_status("x.parquet", None, {})
    assert (status.finished, status.overwriting, status.as_dict()["rows_done"]) == (True, False, 100)
    with open_state(config_of(job, overwrite=True)) as state:
        state.journal.append([good(1)])
    status = output_status("x.parquet", None, {})
    assert (status.finished, status.overwriting, status.as_dict()["rows_done"]) == (False, True, 1)
    assert cli.execute(["status", "x.parquet"]) == 0
    assert "being made anew" in capsys.readouterr().out


def test_slices_of_several_machines(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(job, shard="2/3", output="x/")
    with open_state(config) as state:
        state.journal.append([good(row) for row in range(state.first_row, state.stop_row)])
        state.commit_ready()
        status = output_status("x/", None, {})
        assert [part.holder is not None for part in status.slices] == [False, True, False]
    assert [part.shard for part in status.slices] == ["1/3", "2/3", "3/3"]
    assert [part.rows for part in status.slices] == [30, 30, 40]
    assert [part.rows_done for part in status.slices] == [0, 30, 0]
    cli.execute(["status", "x/"])
    assert "2/3" in capsys.readouterr().out


def test_what_is_no_output_of_a_run(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["status", "y.parquet"], ["retry", "y.parquet"]):
        assert cli.execute(arguments) == 4
        err = capsys.readouterr().err
        assert f"{job.parent}/y.parquet: there is no such output" in err
        assert err.count("\n") == 1
    assert not (job.parent / "y.parquet.punica").exists()
    for arguments in (["status", job.name], ["retry", job.name]):
        assert cli.execute(arguments) == 4
        assert "rows.parquet is not the output of a run: there is no plan in" in capsys.readouterr().err
    assert cli.execute(["status", "nowhere/"]) == 4
    assert f"{job.parent}/nowhere/: there is no such output" in capsys.readouterr().err


def test_retry_takes_up_the_same_job(job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of(
        job, prompt_column="prompt", max_tokens=9, temperature=0.5, stop=("\n",), n=2, output_prefix="p_", limit=90,
        device="cpu", workers=2,
    )  # fmt: skip
    with open_state(config):
        pass
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PUNICA_BATCH_ADAPTERS", "/not/those")
    again = retry_config("../x.parquet", {"max_loras": 3, "max_errors": "50%"})
    assert again.binding() == config.binding()
    assert again.inputs == (str(job),)
    assert again.adapters == str(job.parent / "adapters")
    assert (again.max_loras, again.max_errors, again.workers) == (3, "50%", None)
    assert "prompt_column" in again.model_fields_set
    assert "messages_column" not in again.model_fields_set
    with JobState.open(again, {"model_sha256": "m"}, source=Source.open(again)):
        pass  # no BindingError


def test_retry_accepts_repaired_adapters_and_a_job_file_but_nothing_that_binds(job: Path) -> None:
    with open_state(config_of(job, max_tokens=9, lora_modules={"a": "b"})):
        pass
    (job.parent / "j.toml").write_text('adapters = "repaired"\nmax_tokens = 1\nmax_num_seqs = 4\n')
    again = retry_config("x.parquet", {"lora_modules": {"c": "d"}}, config="j.toml")
    assert (again.adapters, again.max_tokens, again.max_num_seqs) == ("repaired", 9, 4)
    assert again.lora_modules == {"a": str(job.parent / "b"), "c": "d"}, "one more, not in place of the run's"
    assert retry_config("x.parquet", {"lora_modules": {"a": "z"}}).lora_modules == {"a": "z"}


def test_retry_finds_a_remote_output_as_its_job_file_says(job: Path, tmp_path: Path) -> None:
    with open_state(config_of(job, output="memory://out/x.parquet", work_dir=str(tmp_path / "work"), max_tokens=9)):
        pass
    (job.parent / "j.toml").write_text('work_dir = "work"\n')
    again = retry_config("memory://out/x.parquet", {}, config=str(job.parent / "j.toml"))
    assert (again.max_tokens, again.output) == (9, "memory://out/x.parquet")


def test_retry_of_slices_names_one(job: Path) -> None:
    with open_state(config_of(job, shard="2/3")):
        pass
    assert retry_config("x.parquet", {}).shard_of == (0, 3)
    assert retry_config("x.parquet", {"shard": "2/3"}).shard_of == (1, 3)


def test_the_command_that_retries_is_whole(job: Path) -> None:
    assert retry_command(JobConfig(), "x y.parquet") == "punica-batch retry 'x y.parquet'"
    config = JobConfig(shard="2/3", work_dir="work")
    assert retry_command(config, "s3://b/x/") == "punica-batch retry s3://b/x/ --shard 2/3 --work-dir work"
