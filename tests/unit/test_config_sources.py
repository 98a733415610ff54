"""Where values come from: flag > environment > job file > default; and what a job file may not say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from punica_batch.config import JobConfig, nearest
from punica_batch.config_sources import JOB_FILE, find_job_file, load_config, parse_pairs, read_job_file
from punica_batch.errors import ConfigError, UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_each_source_wins_over_the_next(here: Path) -> None:
    write(here / JOB_FILE, 'model = "./file"\nadapters = "./file"\nmax_tokens = 7\n')
    config = load_config(["x.parquet"], {}, environ={})
    assert (config.model, config.adapters, config.max_tokens, config.top_p) == ("file", "file", 7, 1.0)
    environ = {"PUNICA_BATCH_MODEL": "env", "PUNICA_BATCH_ADAPTERS": ""}  # an empty variable says nothing
    config = load_config(["x.parquet"], {"max_tokens": 9, "top_p": None}, environ=environ)
    assert (config.model, config.adapters, config.max_tokens, config.top_p) == ("env", "file", 9, 1.0)
    assert load_config(["x.parquet"], {"model": "flag"}, environ=environ).model == "flag"


def test_tables_are_merged_key_by_key(here: Path) -> None:
    write(here / JOB_FILE, '[storage_options]\nkey = "a"\nendpoint = "b"\n')
    config = load_config(["x.parquet"], {"storage_options": {"key": "c"}}, environ={})
    assert config.storage_options == {"key": "c", "endpoint": "b"}


def test_flags_alone_give_the_defaults_of_the_config(here: Path) -> None:
    assert load_config(["x.parquet"], {}, environ={}) == JobConfig(inputs=("x.parquet",))


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("data/x.parquet", "data"),
        ("data/in/", "data"),
        ("data/*.parquet", "data"),
        ("data/day=*/part.parquet", "data"),
        ("file://{here}/data/x.parquet", "data"),
        ("s3://bucket/x.parquet", "."),
        ("memory://x.parquet", "."),
    ],
)
def test_job_file_lies_beside_the_first_input_else_here(here: Path, given: str, folder: str) -> None:
    write(here / "data" / JOB_FILE, "")
    write(here / JOB_FILE, "")
    found = find_job_file([given.format(here=here), "elsewhere/y.parquet"])
    assert found is not None
    assert found.resolve() == here / folder / JOB_FILE


def test_named_job_file_is_the_only_one_read(here: Path) -> None:
    write(here / JOB_FILE, "max_tokens = 1\ntop_k = 5\n")
    write(here / "jobs/x.toml", 'max_tokens = 2\ninputs = ["../data/a.parquet", "s3://b/c.parquet"]\noutput = "out/"\n')
    config = load_config([], {}, config="jobs/x.toml", environ={})
    assert (config.max_tokens, config.top_k) == (2, 0)
    assert config.inputs == ("data/a.parquet", "s3://b/c.parquet")
    assert config.output == "jobs/out/"
    with pytest.raises(ConfigError, match=r"jobs/y\.toml: no such job file"):
        load_config([], {}, config="jobs/y.toml", environ={})


def test_paths_are_relative_to_the_file_and_hub_names_are_left_alone(here: Path) -> None:
    (here / "jobs/local/model").mkdir(parents=True)
    text = (
        'model = "{}"\nadapters = "ad"\nwork_dir = "/abs"\nchat_template = "{{% if a %}}"\n[lora_modules]\nx = "y/x"\n'
    )
    for written, meant in [
        ("local/model", "jobs/local/model"),
        ("org/model", "org/model"),
        ("./org/model", "jobs/org/model"),
        ("../m", "m"),
        ("hf://org/model", "hf://org/model"),
        ("~/m", os.path.expanduser("~/m")),
    ]:
        values = read_job_file(write(Path("jobs/x.toml"), text.format(written)))
        assert values["model"] == meant
    assert values["adapters"] == "jobs/ad"
    assert values["work_dir"] == "/abs"
    assert values["lora_modules"] == {"x": "jobs/y/x"}
    assert values["chat_template"] == "{% if a %}"


def test_keys_may_be_written_as_the_flags_are(here: Path) -> None:
    values = read_job_file(
        write(here / "x.toml", 'max-num-seqs = 3\ngpus = 8\nmax_errors = 20\nstop = ["\\n", "a,b"]\n')
    )
    assert values == {"max_num_seqs": 3, "gpus": "8", "max_errors": "20", "stop": ("\n", "a,b")}
    assert JobConfig(**values).error_limit(10_000) == 20
    with pytest.raises(ConfigError, match="given twice"):
        read_job_file(write(here / "x.toml", "max-tokens = 3\nmax_tokens = 3\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_tokenz = 3", "unknown key 'max_tokenz'; the nearest valid one is 'max_tokens'"),
        ("temprature = 1.0", "unknown key 'temprature'; the nearest valid one is 'temperature'"),
        ('labels = ["a"]', "unknown key 'labels'"),
        ("tensor_parallel_size = 2", "unknown key 'tensor_parallel_size'"),
        ("overwrite = true", "'overwrite' is for the command line only"),
        ('max_tokens = "3"', "'max_tokens' must be a valid integer, not a string"),
        ("max_tokens = 3.5", "'max_tokens' must be a valid integer"),
        ("max_tokens = true", "'max_tokens' must be a valid integer, not True"),
        ("max_tokens = 0", "'max_tokens' must be greater than or equal to 1, not 0"),
        ("ignore_eos = 1", "'ignore_eos' must be a valid boolean, not 1"),
        ('stop = "x"', "'stop' must be a valid list, not a string"),
        ("inputs = [1]", "'inputs' must be a valid string (0), not 1"),
        ('dtype = "flot16"', "'float32', 'float16' or 'bfloat16'; the nearest valid one is 'float16'"),
        ('kv_cache_dtype = "fp8"', "'kv_cache_dtype' must be"),
        ('max_errors = "many"', "'max_errors' must be a number of rows (20) or a share of them (5%)"),
        ('shard = "3/2"', "'shard' must be I/N"),
        ("[sampling]\ntop_p = 1.0", "keys are top-level, there is no table [sampling]"),
        ("temperature = inf", "'temperature' must be a finite number, not inf"),
        ("temperature = nan", "'temperature' must be"),
        ("max_runtime = inf", "'max_runtime' must be a finite number"),
        ('stop = [""]', "'stop' must be a list of non-empty strings"),
        ("max_tokens = 99999999999999999999", "'max_tokens' must be less than or equal to 2147483647"),
        ("top_k = 2147483648", "'top_k' must be less than or equal to 2147483647"),
        ("seed = 99999999999999999999", "'seed' must be less than 18446744073709551616"),
        ('max_errors = "1e5"', "'max_errors' must be a number of rows"),
        ('output = ""', "'output' is empty"),
        ('model = ""', "'model' is empty"),
        ("top_p =", "cannot be read as TOML"),
    ],
)
def test_wrong_job_file_is_refused_by_file_key_and_nearest(here: Path, text: str, message: str) -> None:
    write(here / "x.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_config([], {}, config="x.toml", environ={})
    assert str(caught.value).startswith("x.toml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_secrets_are_not_repeated(here: Path) -> None:
    write(here / "x.toml", "[storage_options]\npin = 123456\n")
    with pytest.raises(ConfigError) as caught:
        read_job_file(here / "x.toml")
    assert "123456" not in str(caught.value)
    with pytest.raises(ConfigError) as job_file:
        load_config([], {}, config="https://user:pa@hunter2@host/x.toml?token=hunter2", environ={})
    assert str(job_file.value) == "https://host/x.toml: no such job file; check --config"
    with pytest.raises(UsageError) as usage:
        parse_pairs("--storage-option", ["hunter2"])
    assert "hunter2" not in str(usage.value)


def test_flag_out_of_range_is_a_usage_error_that_names_the_flag(here: Path) -> None:
    with pytest.raises(UsageError, match=r"--top-p must be less than or equal to 1, not 3\.0"):
        load_config(["x"], {"top_p": 3.0}, environ={})
    with pytest.raises(UsageError, match="--output is empty"):
        load_config(["x"], {"output": ""}, environ={})
    with pytest.raises(UsageError, match=r"--pack must be 'busiest' or 'spread'; the nearest valid one is 'spread'"):
        load_config(["x"], {"pack": "sprad"}, environ={})


def test_pairs() -> None:
    assert parse_pairs("--lora-modules", ["a=/x=y", "b=s3://c"]) == {"a": "/x=y", "b": "s3://c"}
    for wrong in (["a"], ["=x"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match=r"--lora-modules (must be NAME=PATH|names)"):
            parse_pairs("--lora-modules", wrong)


def test_nearest_always_names_something() -> None:
    assert nearest("zzzz") in JobConfig.model_fields
    assert nearest("max_seqs") == "max_num_seqs"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_token": 3}, "JobConfig: 'max_token' is unknown; the nearest valid one is 'max_tokens'"),
        ({"top_p": 3.0}, "JobConfig: 'top_p' must be less than or equal to 1, not 3.0"),
        ({"dtype": "flot16"}, "JobConfig: 'dtype' must be 'auto', 'float32', 'float16' or 'bfloat16'; the nearest"),
    ],
)
def test_a_wrong_field_in_python_is_one_line_of_ours(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        JobConfig(**values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert "http" not in str(caught.value)


def test_python_values_may_be_written_as_python_and_toml_do() -> None:
    config = JobConfig(
        inputs="x.parquet",
        stop="\n",
        max_errors=10,
        gpus=2,
        output=Path("out/x.parquet"),
        lora_modules={"a": Path("b")},
    )
    assert (config.inputs, config.stop, config.output) == (("x.parquet",), ("\n",), "out/x.parquet")
    assert (config.max_errors, config.gpus, config.lora_modules) == ("10", "2", {"a": "b"})
    assert config.error_limit(1000) == 10
    assert JobConfig(inputs=[Path("a"), "b"]).inputs == ("a", "b")
    assert JobConfig(max_errors="5%") == JobConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": "many"}, "'max_tokens' must be a valid integer, not a string"),
        ({"max_tokens": "9" * 5000}, "'max_tokens' must be a valid integer, not a string"),
        ({"max_tokens": 2.5}, "'max_tokens' must be a valid integer, not 2.5"),
        ({"max_tokens": None}, "'max_tokens' must be a valid integer, not None"),
        ({"temperature": "hot"}, "'temperature' must be a valid number, not a string"),
        ({"ignore_eos": "maybe"}, "'ignore_eos' must be true or false, not a string"),
        ({"columns": "id"}, "'columns' must be a valid list, not a string"),
    ],
)
def test_wrong_types_in_python_are_said_in_our_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        JobConfig(**values)
    assert str(caught.value) == f"JobConfig: {message}"


def test_a_job_file_still_says_its_inputs_as_a_list(here: Path) -> None:
    (here / "j.toml").write_text('inputs = "x.parquet"\n')
    with pytest.raises(ConfigError, match="'inputs' must be a valid list, not a string"):
        load_config((), {}, config="j.toml")
