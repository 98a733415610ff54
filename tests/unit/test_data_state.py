from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import data_job
import pytest
from data_job import no_fsync, opened, update  # noqa: F401 - the first is a fixture
from output_files import check_output, files_of
from test_data_source import numbered, write

from punica_batch.config import JobConfig
from punica_batch.errors import BindingError, JobError

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(params=["out.parquet", "out/"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> JobConfig:
    path = write(numbered(0, 100), tmp_path / "in.parquet", row_group_size=30)
    return JobConfig(inputs=(str(path),), output=f"{tmp_path}/{request.param}", rows_per_shard=30)


def test_resume_runs_each_row_once(config: JobConfig) -> None:
    first = data_job.run(config, stop_after=40, seed=1)
    second = data_job.run(config, stop_after=30, seed=2)
    third = data_job.run(config, seed=3)
    assert first["ran"] + second["ran"] + third["ran"] == 100
    assert third["finished"]
    check_output(config)
    state = Path(config.output + ".punica" if config.output.endswith("parquet") else config.output + "_punica")
    names = {path.name for path in state.iterdir()}
    assert names == {"lock", "lock-all", "plan.json", "commits", "adapters"} | (
        {"_SUCCESS"} if "parquet" in config.output else set()
    )


def test_interrupted_and_whole_runs_give_the_same_bytes(config: JobConfig) -> None:
    data_job.run(config, stop_after=40, seed=1)
    data_job.run(config, seed=2)
    interrupted = files_of(config)
    whole = update(config, output=config.output.replace("out", "whole"))
    data_job.run(whole)
    assert list(files_of(whole).values()) == list(interrupted.values())


def test_success_counts(config: JobConfig) -> None:
    data_job.run(config)
    with opened(config) as state:
        assert state.is_finished
        assert state.success is not None
        assert (state.success.rows, state.success.error_rows, state.success.errors) == (100, 9, {"null_prompt": 9})
        assert sum(state.success.finish_reasons.values()) == 100
        assert state.success.finish_reasons["error"] == 9
        assert state.error_rows == 9
        assert state.done.count(0, 100) == 100
    folder = Path(config.output)
    where = folder / "_SUCCESS" if folder.is_dir() else Path(config.output + ".punica") / "_SUCCESS"
    assert json.loads(where.read_text())["rows"] == 100


def test_a_finished_output_is_left_alone(config: JobConfig) -> None:
    data_job.run(config)
    before = files_of(config)
    assert data_job.run(config) == {"ran": 0, "finished": True}
    assert data_job.run(update(config, workers=7, pack="spread", max_num_seqs=3)) == {"ran": 0, "finished": True}
    assert files_of(config) == before


CHANGES = [
    ({"temperature": 0.5}, r"temperature was 0\.0, is 0\.5"),
    ({"limit": 50}, "limit was not given, is 50"),
    ({"rows_per_shard": 10}, "--rows-per-shard was 30, is 10"),
    ({"prompt_template": "secret words {prompt}"}, "--prompt-template has changed"),
    ({"columns": ("k",)}, "columns was not given, is"),
    ({"shard": "1/2"}, "the N of --shard I/N was 1, is 2"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize("finished", [True, False])
def test_changed_options_are_refused_by_name(
    config: JobConfig, change: dict[str, Any], message: str, finished: bool
) -> None:
    data_job.run(config, stop_after=None if finished else 40)
    with pytest.raises(BindingError, match=message) as caught:
        data_job.run(update(config, **change))
    assert "--overwrite" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert data_job.run(config)["finished"]
    check_output(config)


def test_a_plan_under_which_nothing_was_done_binds_nothing(config: JobConfig) -> None:
    with opened(config):
        pass
    changed = update(config, temperature=0.5)
    assert data_job.run(changed)["finished"]
    with pytest.raises(BindingError, match="temperature"):
        data_job.run(config)


def test_changed_model_and_input_are_refused(config: JobConfig, tmp_path: Path) -> None:
    data_job.run(config, stop_after=40)
    with pytest.raises(BindingError, match='model_digest was "m1", is "m2"'):
        data_job.run(config, {**data_job.BINDING, "model_digest": "m2"})
    write(numbered(0, 101), tmp_path / "in.parquet")
    with pytest.raises(BindingError, match=r"input .*in\.parquet has changed \(size, mtime, footer, rows\)"):
        data_job.run(config)
    moved = update(config, inputs=(str(write(numbered(0, 100), tmp_path / "moved.parquet")),))
    with pytest.raises(BindingError, match="is no longer there"):
        data_job.run(moved)


def test_adapters_are_bound_at_first_use(config: JobConfig) -> None:
    with opened(config) as state:
        state.bind_adapters({"a": "1" * 64, "b": "2" * 64})
        state.bind_adapter("a", "1" * 64)
    with opened(config) as state:
        state.bind_adapter("a", "1" * 64)
        with pytest.raises(BindingError, match=r"adapter 'b' \(its files .*\) was 2{12}… .* is 3{12}"):
            state.bind_adapters({"c": "4" * 64, "b": "3" * 64})
        state.bind_adapter("b", "3" * 64, rebind=True)
    with opened(config) as state:
        state.bind_adapter("b", "3" * 64)
        state.bind_adapter("c", "5" * 64)


def test_foreign_output_is_never_replaced_unasked(config: JobConfig, tmp_path: Path) -> None:
    name = "out.parquet" if config.output.endswith("parquet") else "out/part-00000.parquet"
    foreign = write(numbered(0, 3), tmp_path / name)
    content = foreign.read_bytes()
    with pytest.raises(BindingError, match="not of this program's making: --overwrite"):
        data_job.run(config)
    assert foreign.read_bytes() == content
    assert data_job.run(update(config, overwrite=True))["finished"]
    check_output(config)


def test_overwrite_keeps_the_old_output_until_the_new_is_complete(config: JobConfig) -> None:
    old = update(config, rows_per_shard=10, temperature=1.0)
    data_job.run(old, {**data_job.BINDING, "model_digest": "old"})
    before = files_of(config)
    new = update(config, overwrite=True)
    assert data_job.run(new, stop_after=60, seed=1) == {"ran": 56, "finished": False}
    assert files_of(config) == before
    assert data_job.run(new, seed=2) == {"ran": 44, "finished": True}
    check_output(config)
    assert len(files_of(config)) == (1 if config.output.endswith("parquet") else 4)
    assert data_job.run(config) == {"ran": 0, "finished": True}
    with pytest.raises(BindingError):
        data_job.run(old)
    assert data_job.run(new)["ran"] == 100  # asked for again, done again
    check_output(config)


def test_overwrite_of_an_unfinished_overwrite_with_other_options(config: JobConfig) -> None:
    data_job.run(config)
    data_job.run(update(config, overwrite=True, temperature=0.5), stop_after=50)
    assert data_job.run(update(config, overwrite=True, temperature=0.7))["ran"] == 100
    with pytest.raises(BindingError, match=r"temperature was 0\.7"):
        data_job.run(config)


def test_a_lost_part_is_an_error(tmp_path: Path) -> None:
    path = write(numbered(0, 100), tmp_path / "in.parquet")
    config = JobConfig(inputs=(str(path),), output=f"{tmp_path}/out/", rows_per_shard=30)
    data_job.run(config)
    (tmp_path / "out" / "part-00001.parquet").unlink()
    with pytest.raises(BindingError, match=r"part-00001\.parquet is gone.*--overwrite"):
        data_job.run(config)
    assert data_job.run(update(config, overwrite=True))["finished"]
    check_output(config)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_a_part_that_is_not_as_it_was_is_refused(config: JobConfig, finished: bool, lost: bool) -> None:
    is_single = config.output.endswith("parquet")
    if finished and is_single:
        return
    with opened(config) as state:
        state.journal.append([data_job.result(row, config) for row in range(100 if finished else 70)])
        assert len(state.commit_ready()) == (4 if finished else 2)
        if finished:
            state.finish()
    part = Path(config.output + (".punica/parts" if is_single else "")) / "part-00001.parquet"
    if lost:
        part.unlink()
    else:
        part.write_bytes(part.read_bytes() + b"x")
    with pytest.raises(BindingError, match=r"part-00001\.parquet (is gone|has \d+ bytes, not).*--overwrite"):
        data_job.run(config)
    assert data_job.run(update(config, overwrite=True))["finished"]
    check_output(config)


@pytest.mark.parametrize("name", ["plan.json", "_SUCCESS"])
@pytest.mark.parametrize("content", [b'{"format": 1', b"[]"])
def test_damaged_state_is_refused_until_overwritten(config: JobConfig, name: str, content: bytes) -> None:
    data_job.run(config)
    state = Path(config.output + ".punica" if config.output.endswith("parquet") else config.output + "_punica")
    path = state.parent / name if name == "_SUCCESS" and config.output.endswith("/") else state / name
    assert path.exists()
    path.write_bytes(content)
    with pytest.raises(BindingError, match=f"{name} is damaged: start over with `run --overwrite`"):
        data_job.run(config)
    assert data_job.run(update(config, overwrite=True))["finished"]
    check_output(config)


@pytest.mark.parametrize("stop_after", [40, None])
def test_what_another_version_wrote_is_refused_until_overwritten(config: JobConfig, stop_after: int | None) -> None:
    """Of format 1, whose adapters' digests no longer agree: said once, and not adapter by adapter."""
    data_job.run(config, stop_after=stop_after)
    plan = Path(config.output + (".punica" if config.output.endswith("parquet") else "_punica")) / "plan.json"
    written = json.loads(plan.read_text())
    assert written["format"] == 2
    plan.write_text(json.dumps({**written, "format": 1}))
    with pytest.raises(BindingError) as refused:
        data_job.run(config)
    assert str(refused.value) == (
        f"{plan} has format 1, this version writes 2: go on with the version that wrote it, "
        "or start over with `run --overwrite`"
    )
    assert data_job.run(update(config, overwrite=True))["finished"]
    check_output(config)


@pytest.mark.parametrize("how", ["moved", "overwritten", "gone"])
def test_an_input_that_changes_during_the_run_gives_nothing_more(config: JobConfig, tmp_path: Path, how: str) -> None:
    path = tmp_path / "in.parquet"
    kept = tmp_path / "kept"
    with opened(config) as state:
        state.journal.append([data_job.result(row, config) for row in range(60)])
        state.journal.sync()
        assert len(state.commit_ready(limit=1)) == 1
        os.link(path, kept)
        if how == "overwritten":
            content = path.read_bytes()
            path.write_bytes(content[:300] + bytes(50) + content[350:])
        elif how == "moved":
            os.replace(write(numbered(100, 200), tmp_path / "new"), path)
        else:
            path.unlink()
        with pytest.raises(JobError, match=r"input .*in\.parquet changed while the job ran: bring the old file back"):
            state.commit_ready()
        with pytest.raises(JobError, match="changed while"):
            list(state.source.work_batches(60, 100))
        assert state.committed == 1
    if how == "overwritten":
        return
    os.replace(kept, path)
    assert data_job.run(config)["ran"] == 40
    check_output(config)


def test_a_part_that_carries_nothing_is_not_committed_beside_a_changed_input(config: JobConfig, tmp_path: Path) -> None:
    bare = update(config, columns=())
    with opened(bare) as state:
        state.journal.append([data_job.result(row, bare) for row in range(30)])
        write(numbered(100, 200), tmp_path / "in.parquet")
        with pytest.raises(JobError, match="changed while"):
            state.commit_ready()
        assert state.committed == 0
