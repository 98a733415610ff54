"""``plan``, ``validate``, ``adapters`` and the check before a run, on a small job with known faults."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapter_files import lora_tensors, write_adapter
from job_files import CONTEXT, stay_in, write_job, write_rows
from tokenizers import Tokenizer as Backend

from punica_batch import cli
from punica_batch.config_sources import load_config
from punica_batch.data.cursor import READ_ROWS, Cursor
from punica_batch.data.source import Source
from punica_batch.errors import InputError, UsageError, ValidationError
from punica_batch.models.config import ModelConfig
from punica_batch.planning.memory import resolve_dtypes, slot_bytes, worker_memory, workspace_bytes
from punica_batch.planning.opened import open_job, shard_rows
from punica_batch.planning.overview import make_plan
from punica_batch.planning.preflight import check_reports, count_adapters, preflight, refuse_if_too_many
from punica_batch.planning.sample import SAMPLE_ROWS, sample_rows, stretches
from punica_batch.types import AdapterSpec
from punica_batch.workers.devices import Device


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stay_in(tmp_path, monkeypatch)
    return write_job(tmp_path)


def config_of(job: Path, **flags: Any) -> Any:
    return load_config([str(job)], {"device": "cpu", **flags}, environ={})


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert cli.execute([*arguments, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_plan_counts_what_a_count_by_hand_gives(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(["plan", str(job), "--device", "cpu", "--workers", "2"], capsys)
    table = pq.read_table(job)
    backend = Backend.from_file(str(job.parent / "model" / "tokenizer.json"))
    good = [row for row in table.to_pylist() if row["lora_id"] not in ("wrong", "nobody") and row["prompt"] is not None]
    lengths = [len(backend.encode(row["prompt"]).ids) for row in good]
    assert plan["schema_version"] == 1
    assert plan["rows"] == 100
    assert plan["samples"] == len(good) == 95
    assert plan["tokens"] == {
        "prompt_tokens": sum(lengths), "mean_prompt_tokens": pytest.approx(np.mean(lengths), abs=0.01),
        "max_prompt_tokens": max(lengths), "sampled_rows": 95, "exact": True, "max_generated_tokens": 95 * 8,
    }  # fmt: skip
    assert plan["adapters"]["count"] == 4
    assert plan["adapters"]["base_rows"] == 16
    assert plan["adapters"]["ranks"] == {"2": 1, "4": 1}
    assert [(entry["lora_id"], entry["rows"]) for entry in plan["adapters"]["top"]] == [
        ("good", 60), ("wide", 20), ("wrong", 3), ("nobody", 1),
    ]  # fmt: skip
    assert plan["errors"] == {
        "rows": 5, "by_code": {"adapter_unreadable": 3, "null_prompt": 1, "unknown_adapter": 1}, "limit": 5,
        "stops": False, "allowance": "--max-errors 5% of 100 rows allows 5",
    }  # fmt: skip
    assert plan["placement"]["names"] == ["0", "1"]
    (preview,) = plan["previews"]
    expected = backend.encode("hello there")
    assert [(t["id"], t["token"]) for t in preview["tokens"]] == list(zip(expected.ids, expected.tokens, strict=True))
    assert plan["inputs"] == [{"path": str(job), "nbytes": job.stat().st_size, "rows": 100}]


def test_plan_for_people_names_the_faults(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["plan", str(job), "--device", "cpu", "--max-errors", "1"]) == 0
    out = capsys.readouterr().out
    assert "95 answers, at most 760 tokens" in out
    assert "4 (1 of rank 2, 1 of rank 4, 2 missing or bad), 16 rows for the base model" in " ".join(out.split())
    assert "use_dora is not supported" in out
    assert "the registry has no adapter 'nobody' (1 row)" in out
    assert "run would stop: 5 rows would fail, --max-errors allows 1" in out
    assert "⟨0 <|begin|>⟩" in out


def test_plan_shows_the_rest_when_memory_does_not_suffice(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("punica_batch.workers.devices.available_memory", lambda: 1 << 20)
    plan = make_plan(config_of(job))
    assert plan.memory is None
    assert any(line.startswith("run would stop: the model needs") for line in plan.warnings)
    assert plan.adapters.count == 4


def test_plan_of_a_large_input_is_a_sample_spread_over_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = 30_000
    short, long = "hello", "hello hello hello hello hello hello hello"
    prompts = [short if i < rows // 2 else long for i in range(rows)]
    prompts[0] = long
    many = write_rows(job.parent / "many.parquet", ["good"] * (rows - 30) + ["nobody"] * 30, prompts)
    plan = run_json(["plan", str(many), "--device", "cpu"], capsys)
    exact = run_json(["plan", str(many), "--device", "cpu", "--exact"], capsys)
    assert not plan["tokens"]["exact"]
    assert plan["tokens"]["sampled_rows"] <= SAMPLE_ROWS
    assert exact["tokens"]["exact"]
    assert plan["tokens"]["prompt_tokens"] == pytest.approx(exact["tokens"]["prompt_tokens"], rel=0.05)
    assert plan["adapters"]["top"] == exact["adapters"]["top"]  # counted, not sampled
    assert plan["adapters"]["problems"][0]["rows"] == 30


def test_a_sample_of_one_huge_row_group_decodes_it_once_and_ends_in_time(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = write_rows(job.parent / "many.parquet", ["good"] * 150_000, ["hello"] * 150_000)
    assert pq.read_metadata(many).num_row_groups == 1
    opened = open_job(config_of(many))
    found = preflight(opened, 0, 150_000)
    decoded = 0
    next_batch = Cursor._next_batch

    def counted(cursor: Cursor) -> pa.RecordBatch:
        nonlocal decoded
        decoded += cursor._left is None
        return next_batch(cursor)

    monkeypatch.setattr(Cursor, "_next_batch", counted)
    whole = sample_rows(opened, found, 0, 150_000, exact=False)
    assert whole.rows == SAMPLE_ROWS
    assert decoded <= 150_000 // READ_ROWS + 1
    clock = iter(range(1000))  # each look at it takes a second
    monkeypatch.setattr("punica_batch.planning.sample.time", SimpleNamespace(monotonic=lambda: next(clock)))
    cut = sample_rows(opened, found, 0, 150_000, exact=False)
    assert 0 < cut.rows < SAMPLE_ROWS
    assert not cut.exact


@pytest.mark.parametrize("rows", [0, 1, SAMPLE_ROWS, SAMPLE_ROWS + 1, 2_000_000])
def test_stretches_are_disjoint_and_reach_both_ends(rows: int) -> None:
    ranges = list(stretches(7, 7 + rows))
    numbers = [row for first, last in ranges for row in range(first, last)]
    assert len(set(numbers)) == min(rows, SAMPLE_ROWS)
    if rows > SAMPLE_ROWS + 1:
        assert len(numbers) == SAMPLE_ROWS
    assert all(7 <= row < 7 + rows for row in numbers)
    if rows:
        assert min(numbers) == 7
        assert max(numbers) == 6 + rows


@pytest.mark.parametrize(("rows", "size", "count"), [(0, 10, 3), (95, 10, 3), (100, 10, 8), (5, 10, 4), (1000, 1, 7)])
def test_shards_are_whole_parts_and_cover_every_row_once(job: Path, rows: int, size: int, count: int) -> None:
    shards = [shard_rows(config_of(job, shard=f"{i + 1}/{count}", rows_per_shard=size), rows) for i in range(count)]
    assert [row for first, last in shards for row in range(first, last)] == list(range(rows))
    assert all(first % size == 0 or first == rows for first, _ in shards)
    assert shard_rows(config_of(job), rows) == (0, rows)


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


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_adapters_are_counted_whatever_their_column_is(job: Path, kind: pa.DataType) -> None:
    rng = np.random.default_rng(0)
    names = [None, "", "a", "b", "한국"]
    lora_ids = [names[i] for i in rng.integers(0, len(names), 5000)]
    table = pa.table({"prompt": ["x"] * 5000, "lora_id": pa.array(lora_ids, pa.string()).cast(kind)})
    pq.write_table(table, job.parent / "x.parquet", row_group_size=700)
    config = config_of(job.parent / "x.parquet")
    use = count_adapters(Source.open(config), config, 100, 4900)
    assert use.rows == dict(Counter(name or None for name in lora_ids[100:4900]))
    assert use.exact
    assert use.names() == sorted(("a", "b", "한국"), key=lambda name: (-use.rows[name], name))


def test_counting_stops_in_time(job: Path) -> None:
    rows = write_rows(job.parent / "many.parquet", ["good"] * 200_000, ["x"] * 200_000)
    config = config_of(rows)
    use = count_adapters(Source.open(config), config, 0, 200_000, seconds=0.0)
    assert 0 < use.counted < 200_000
    assert not use.exact


def test_a_job_without_an_adapter_column_is_all_base_rows(job: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 9}), job.parent / "x.parquet")
    config = config_of(job.parent / "x.parquet")
    assert count_adapters(Source.open(config), config, 0, 9).rows == {None: 9}


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


def test_sampled_errors_leave_out_those_of_adapters(job: Path) -> None:
    opened = open_job(config_of(job, n=3))
    sample = sample_rows(opened, preflight(opened, 0, 100), 0, 100, exact=False)
    assert sample.errors == {"null_prompt": 1}
    assert sample.rows == 100
    assert sample.exact
    assert set(sample.samples) == {3}
    assert sum(sample.generated_tokens) == 95 * 8 * 3


def test_memory_is_planned_from_true_sizes(job: Path) -> None:
    model = ModelConfig.from_folder(job.parent / "model")
    config = config_of(job)
    assert resolve_dtypes(config, model.torch_dtype, "cuda").model == "bfloat16"
    wide = resolve_dtypes(config_of(job, dtype="float32"), model.torch_dtype, "cuda")
    assert resolve_dtypes(config, model.torch_dtype, "cpu") == wide
    assert resolve_dtypes(config_of(job, kv_cache_dtype="float16"), model.torch_dtype, "cpu").kv_cache == "float16"
    specs = {"wide": AdapterSpec("wide", str(job.parent / "adapters" / "wide"))}
    report = check_reports(specs, config, model)["wide"]
    assert slot_bytes(report, model, "float32") == sum(tensor.nbytes for tensor in lora_tensors(4).values())
    opened = open_job(config)
    plan = worker_memory(opened, preflight(opened, 0, 100), Device("0", "cpu", 4 << 30), [16] * 10, 95)
    assert plan.total_bytes == int((4 << 30) * 0.9)
    assert plan.weight_bytes == model.weight_bytes("float32")
    assert plan.max_loras == 2
    assert plan.max_num_seqs == 95
    assert workspace_bytes(model, 2048, 256, "float32", "cpu") < 1 << 30


def test_adapters_that_could_not_be_counted_are_planned_for(job: Path) -> None:
    """Rows may name any of the registry's, of a rank that nobody has seen: room for one of the highest, all slots."""
    opened = open_job(config_of(job, max_lora_rank=64))
    found = preflight(opened, 0, 100)
    met = {name: spec for name, spec in found.specs.items() if name != "wide"}
    some = dataclasses.replace(found, specs=met, use=dataclasses.replace(found.use, exact=False))
    device = Device("0", "cuda", 8 << 30)
    linear = sum(sum(shape) for name, shape in opened.model.lora_modules().items() if ".layers." in name)
    assert worker_memory(opened, found, device, [16] * 10, 95).adapter_bytes < 64 * linear * 2
    plan = worker_memory(opened, some, device, [16] * 10, 95)
    assert plan.adapter_bytes >= 64 * linear * 2
    assert plan.max_loras >= len(opened.registry.names()) - len(found.errors)


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


def write_both(job: Path) -> Path:
    """Twenty rows with a prompt and messages."""
    talk = pa.array(
        [[{"role": "user", "content": "hi"}]] * 20, pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    )
    table = pa.table({"prompt": ["said"] * 20, "messages": talk, "lora_id": ["good"] * 20})
    pq.write_table(table, job.parent / "both.parquet")
    return job.parent / "both.parquet"


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
