"""``validate`` and ``adapters``: every fault is found and named before any work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapter_files import lora_tensors, write_adapter
from job_files import CONTEXT, config_of, run_json, stay_in, write_both, write_job, write_rows

from punica_batch import cli
from punica_batch.errors import InputError, UsageError, ValidationError
from punica_batch.planning.opened import open_job
from punica_batch.planning.preflight import preflight, refuse_if_too_many


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stay_in(tmp_path, monkeypatch)
    return write_job(tmp_path)


def test_validate_lists_every_failing_row_by_code(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(["validate", str(job), "-q"], capsys, code=3)
    found = {failure["code"]: (failure["rows"], failure["first_rows"]) for failure in report["failures"]}
    assert found == {
        "adapter_unreadable": (3, [96, 97, 98]), "null_prompt": (1, [7]), "unknown_adapter": (1, [99]),
    }  # fmt: skip
    assert (report["rows"], report["rows_failing"], report["adapters"], report["stops"]) == (100, 5, 4, False)
    assert len(report["problems"]) == 2
    assert run_json(["plan", str(job), "--device", "cpu"], capsys)["adapters"]["count"] == report["adapters"]
    assert cli.execute(["validate", str(job), "--max-errors", "4"]) == 4
    out, err = capsys.readouterr()
    assert "run would stop: 5 rows would fail, --max-errors allows 4" in out
    assert "95 of 100 rows would run, 4 adapters (2 missing or bad)" in out
    problems = [line.removeprefix("problem: ") for line in out.splitlines() if line.startswith("problem: ")]
    assert problems == report["problems"], "all, the table's examples among them"
    assert "checking: 100 of 100 rows (100 %)" in err


def test_validate_of_a_good_job_exits_0(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_rows(job.parent / "good.parquet", ["good", None, "wide"])
    assert run_json(["validate", str(good)], capsys)["failures"] == []


def test_rows_that_exceed_the_context_are_found(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["hello " * (2 * CONTEXT) if i % 2 else "hi" for i in range(30)]
    long = write_rows(job.parent / "long.parquet", ["good"] * 30, prompts)
    report = run_json(["validate", str(long)], capsys, code=4)
    (failure,) = report["failures"]
    assert (failure["code"], failure["rows"]) == ("prompt_too_long", 15)
    assert report["stops"]
    assert failure["first_rows"] == list(range(1, 21, 2)), "the first ten"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-column", "text"], "'text'"),
        (["--columns", "prompt,nope"], "'nope'"),
        (["--model", "./nowhere"], "nowhere"),
        (["--adapters", "./nowhere"], "nowhere"),
        (
            ["--chat-template", "./nowhere.jinja", "--apply-chat-template"],
            "--chat-template: ./nowhere.jinja is neither",
        ),
    ],
)
def test_what_is_wrong_with_the_whole_job_is_an_error(
    job: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    for command in ("plan", "validate"):
        assert cli.execute([command, str(job), *arguments]) == 4
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1


def test_column_that_would_be_hidden_is_refused_before_any_work(job: Path) -> None:
    table = pq.read_table(job).append_column("generation", pa.nulls(100))
    pq.write_table(table, job.parent / "hidden.parquet")
    with pytest.raises(InputError, match="--output-prefix"):
        open_job(config_of(job.parent / "hidden.parquet"))
    open_job(config_of(job.parent / "hidden.parquet", output_prefix="new_"))


def test_no_model_and_a_context_beyond_the_models(job: Path) -> None:
    config = config_of(job)
    with pytest.raises(UsageError, match="PUNICA_BATCH_MODEL"):
        open_job(config.model_copy(update={"model": None}))
    with pytest.raises(UsageError, match=f"--max-model-len {CONTEXT + 1} is beyond the model's own {CONTEXT}"):
        open_job(config.model_copy(update={"max_model_len": CONTEXT + 1}))
    assert open_job(config.model_copy(update={"max_model_len": 10})).max_model_len == 10


def test_preflight_refuses_only_beyond_max_errors(job: Path) -> None:
    opened = open_job(config_of(job))
    found = preflight(opened, 0, 100)
    assert set(found.specs) == {"good", "wide"}
    assert found.max_rank == 4
    assert found.failing_rows == 4
    assert {name: error.partition(":")[0] for name, error in found.errors.items()} == {
        "wrong": "adapter_unreadable", "nobody": "unknown_adapter",
    }  # fmt: skip
    refuse_if_too_many(found, config_of(job, max_errors="4"), 100)
    with pytest.raises(ValidationError, match=r"4 of 100 rows would fail, --max-errors allows 3: .*use_dora.*1 more"):
        refuse_if_too_many(found, config_of(job, max_errors="3"), 100)
    with pytest.raises(ValidationError, match="--on-error raise allows none"):
        refuse_if_too_many(found, config_of(job, on_error="raise"), 100)


def test_max_lora_rank_makes_an_adapters_rows_fail(job: Path) -> None:
    found = preflight(open_job(config_of(job, max_lora_rank=3)), 0, 100)
    assert found.errors["wide"] == ("adapter_unreadable: adapter 'wide': its rank is 4, above --max-lora-rank 3")
    assert found.failing_rows == 24


def test_adapters_ls_and_check(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = lora_tensors(2)
    next(iter(nan.values()))[0, 0] = np.nan
    write_adapter(job.parent / "adapters" / "nan", nan)
    listed = run_json(["adapters", "ls"], capsys)["adapters"]
    assert [entry["name"] for entry in listed] == ["bad", "good", "nan", "wide", "wrong"]
    by_name = {entry["name"]: entry for entry in listed}
    assert by_name["wide"]["ranks"] == [4]
    assert by_name["wide"]["targets"] == ["q_proj"]
    assert len(by_name["wide"]["sha256"]) == 64
    assert by_name["good"]["sha256"] != by_name["wide"]["sha256"]
    assert by_name["nan"]["problem"] is None, "ls reads no numbers"
    checked = {entry["name"]: entry for entry in run_json(["adapters", "check"], capsys, code=4)["adapters"]}
    assert "NaN" in checked["nan"]["problem"]
    assert "has shape (3, 8)" in checked["bad"]["problem"]
    assert "use_dora" in checked["wrong"]["problem"]
    assert checked["good"]["problem"] is None
    assert checked["good"]["sha256"] == by_name["good"]["sha256"]
    assert run_json(["adapters", "check", "good", "wide"], capsys)["adapters"][1]["name"] == "wide"
    (missing,) = run_json(["adapters", "check", "nobody"], capsys, code=4)["adapters"]
    assert run_json(["adapters", "ls", "good", "nobody"], capsys, code=4)["adapters"][1] == missing
    assert missing["problem"].startswith("unknown_adapter: ")
    assert cli.execute(["adapters", "ls"]) == 0
    out = capsys.readouterr().out
    assert "problem: adapter 'wrong'" in out


def test_adapters_needs_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PUNICA_BATCH_ADAPTERS", raising=False)
    assert cli.execute(["adapters", "ls"]) == 2


def write_registry(job: Path, template: str) -> Path:
    path = job.parent / "registry.toml"
    path.write_text(f'[adapters.good]\npath = "adapters/good"\nprompt_template = "{template}"\n')
    return path


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_of_prompt_and_messages_the_named_one_is_used(
    job: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    """The other is a carried column, though the adapter's template names it."""
    registry = write_registry(job, "{prompt}{messages}" if column == "prompt" else "{prompt}")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    line = ["--adapters", str(registry), f"--{column}-column", column, "--chat-template", template, "--device", "cpu"]
    source = write_both(job)
    assert run_json(["validate", str(source), *line], capsys)["rows_failing"] == 0
    plan = run_json(["plan", str(source), *line], capsys)
    text = "".join(token["token"] for token in plan["previews"][0]["tokens"]).replace("<|begin|>", "")
    assert text == "hi" if column == "messages" else text.startswith("said[")


def test_one_registry_serves_inputs_with_other_column_names(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"text": ["a"] * 3, "lora_id": ["good"] * 3}), job.parent / "text.parquet")
    line = [str(job.parent / "text.parquet"), "--adapters", str(write_registry(job, "Q {prompt}"))]
    assert run_json(["validate", *line, "--prompt-column", "text"], capsys)["failures"] == []
    assert cli.execute(["validate", *line]) == 4
    assert "name yours with --prompt-column" in capsys.readouterr().err


def test_a_missing_adapter_column_is_said(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "lora": ["good"]}), job.parent / "x.parquet")
    line = [str(job.parent / "x.parquet")]
    expected = (
        "adapters are configured, but the input has no column 'lora_id'; did you mean 'lora' (--lora-column lora)? "
        "All rows use the base model"
    )
    assert expected in run_json(["plan", *line, "--device", "cpu"], capsys)["warnings"]
    assert expected in run_json(["validate", *line], capsys)["warnings"]
    opened = open_job(config_of(job.parent / "x.parquet"))
    alone = open_job(opened.config.model_copy(update={"adapters": None}))
    assert preflight(alone, 0, 1).warnings == ()


def test_two_frames_for_a_prompt_are_said(job: Path) -> None:
    both = {"adapters": str(write_registry(job, "Q {prompt}")), "max_errors": "100%"}
    config = config_of(job, apply_chat_template=True, chat_template="{{ messages[0].content }}", **both)
    (line,) = preflight(open_job(config), 0, 100).warnings
    assert line.startswith("the prompt_template of adapter 'good' and --apply-chat-template are both in force")
    assert preflight(open_job(config.model_copy(update={"apply_chat_template": None})), 0, 100).warnings == ()


def test_option_columns_are_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"prompt": ["a"], "n": [2], "stop": ["x"], "steps": [1]})
    pq.write_table(table, job.parent / "x.parquet")
    line = [str(job.parent / "x.parquet")]
    assert run_json(["plan", *line, "--device", "cpu"], capsys)["option_columns"] == ["stop", "n"]
    assert run_json(["validate", *line], capsys)["option_columns"] == ["stop", "n"]
    assert cli.execute(["plan", *line, "--device", "cpu"]) == cli.execute(["validate", *line]) == 0
    out = capsys.readouterr().out
    assert "from the columns stop, n" in out
    assert "columns taken as options of their rows: stop, n" in out


def test_a_share_allows_one_row_and_the_message_says_how_it_comes_about(job: Path) -> None:
    found = preflight(open_job(config_of(job)), 0, 100)
    assert [config_of(job).error_limit(rows) for rows in (12, 39, 40, 100)] == [1, 1, 2, 5]
    assert config_of(job, max_errors="0%").error_limit(12) == config_of(job, max_errors="0").error_limit(12) == 0
    with pytest.raises(ValidationError, match="4 of 18 rows would fail, --max-errors 5% of 18 rows allows 1: "):
        refuse_if_too_many(found, config_of(job), 18)


def test_an_adapter_is_proposed_or_the_flags_that_name_some(job: Path) -> None:
    rows = write_rows(job.parent / "x.parquet", ["god"] * 3)
    found = preflight(open_job(config_of(rows)), 0, 3)
    assert found.errors == {"god": "unknown_adapter: the registry has no adapter 'god'; did you mean 'good'?"}
    config = config_of(rows).model_copy(update={"adapters": None})
    (error,) = preflight(open_job(config), 0, 3).errors.values()
    assert error == "unknown_adapter: no adapters are named: give --adapters or --lora-modules"


@pytest.mark.parametrize("name", ["x.csv", "x.json", "out.d"])
def test_an_output_of_another_format_is_refused(job: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for command in ("plan", "run"):
        assert cli.execute([command, str(job), "-o", name, "--device", "cpu"]) == 2
        err = capsys.readouterr().err
        assert f"-o {name}" in err
        assert f"{name}/" in err
    assert not (job.parent / name).exists()
    plan = run_json(["plan", str(job), "-o", f"../{job.parent.name}/{name}/", "--device", "cpu"], capsys)
    assert plan["parts"]["path"] == f"{job.parent}/{name}/"
