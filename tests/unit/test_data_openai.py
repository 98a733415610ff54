from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import data_job
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_job import no_fsync  # noqa: F401 - a fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from punica_batch.config import JobConfig
from punica_batch.data import openai_input
from punica_batch.data.columns import ERROR_COLUMN
from punica_batch.data.openai_request import parse_line
from punica_batch.data.paths import default_output
from punica_batch.data.source import Source
from punica_batch.data.state import JobState
from punica_batch.errors import InputError, JobError, UsageError
from punica_batch.types import RowResult

pytestmark = pytest.mark.usefixtures("no_fsync")

CONFIG = JobConfig(model="/models/SmolLM2-135M", logprobs=5)


def line(body: Any, **values: Any) -> bytes:
    request = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body, **values}
    return json.dumps(request).encode()


def chat(**values: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **values}


def parsed(body: Any, **values: Any) -> dict[str, Any]:
    return {key: value for key, value in parse_line(line(body, **values), CONFIG).items() if value is not None}


def test_a_chat_request_becomes_a_row() -> None:
    body = chat(
        model="spam", max_tokens=5, max_completion_tokens=7, temperature=1, top_p=0.5, top_k=3, min_p=0.1, seed=-4,
        stop="END", n=2, logprobs=True, top_logprobs=5, user="u", stream=False, presence_penalty=0.0,
    )  # fmt: skip
    row = parsed(body)
    assert row.pop("line").startswith('{"custom_id"')
    assert row == {
        "custom_id": "r", "endpoint": "chat", "model": "spam", "lora_id": "spam", "max_tokens": 7, "temperature": 1.0,
        "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -4, "stop": ["END"], "n": 2,
        "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip


@pytest.mark.parametrize("model", [None, "", "/models/SmolLM2-135M", "SmolLM2-135M"])
def test_the_base_models_names(model: str | None) -> None:
    assert "lora_id" not in parsed(chat(model=model))


def test_prompts_and_parts_of_text() -> None:
    completion = parsed({"prompt": "once", "logprobs": 3}, url="/v1/completions")
    assert (completion["prompt"], completion["endpoint"]) == ("once", "completion")
    assert parsed({"prompt": ["once"]}, url="/v1/completions")["prompt"] == "once"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parsed(chat(messages=[{"role": "user", "content": parts}]))["messages"] == [
        {"role": "user", "content": "ab"}
    ]


BAD = [
    (b"nonsense", "bad_json: the line is not valid JSON."),
    (b'{"custom_id": "x", "body": ' + b"[" * 100_000, "bad_json: the line is not valid JSON."),
    (b'"text"', "bad_request: the line is not a JSON object."),
    (b'{"body": "\xff"}', "invalid_utf8: the line is not valid UTF-8."),
    (line(chat(user="\ud800")), "invalid_utf8: the line is not valid UTF-8."),
    (line(chat(), custom_id=5), "bad_request: custom_id must be a string."),
    (line([]), "bad_request: body must be a JSON object."),
    (line(chat(), url="/v1/embeddings"), "unsupported_request: "),
    (line(chat(), method="GET"), "unsupported_request: "),
    (line(chat(), url=["/v1/completions"]), "unsupported_request: "),
    (line({"messages": []}), "bad_request: messages must be a list that is not empty."),
    (line({"messages": [{"role": "user"}]}), "bad_request: each of messages must have text"),
    (line({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "unsupported_option: only text"),
    (line({"prompt": [1, 2]}, url="/v1/completions"), "bad_request: prompt must be one string."),
    (line(chat(model=3)), "bad_request: model must be a string."),
    (line(chat(max_tokens=1.5)), "bad_request: max_tokens must be an integer."),
    (line(chat(n=True)), "bad_request: n must be an integer."),
    (line(chat(seed=2**70)), "bad_request: seed must fit 64 bits."),
    (line(chat(temperature="hot")), "bad_request: temperature must be a number."),
    (line(chat(stop=[1])), "bad_request: stop must be a string or a list of strings."),
    (line(chat(tools=[{"type": "function"}])), "unsupported_option: body key 'tools'"),
    (line(chat(response_format={"type": "json_object"})), "unsupported_option: body key 'response_format'"),
    (line(chat(presence_penalty=0.5)), "unsupported_option: body key 'presence_penalty'"),
    (line(chat(invented=1)), "unsupported_option: body key 'invented'"),
    (line(chat(logprobs=True, top_logprobs=9)), "unsupported_option: the row asks for log-probabilities"),
]


@pytest.mark.parametrize(("text", "error"), BAD)
def test_a_bad_line_is_its_rows_error(text: bytes, error: str) -> None:
    row = parse_line(text, CONFIG)
    assert row[ERROR_COLUMN].startswith(error)
    assert row["line"]


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_line_can_end_a_job(text: bytes) -> None:
    parse_line(text, CONFIG)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "messages",
                        "prompt",
                        "model",
                        "stop",
                        "n",
                        "logprobs",
                        "top_logprobs",
                        "role",
                        "content",
                        "type",
                        "text",
                        "seed",
                        "temperature",
                        "tools",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
    )
)
@settings(max_examples=200, deadline=None)
def test_no_body_can_end_a_job(body: Any) -> None:  # fmt: skip
    row = parse_line(line(body), CONFIG)
    source_types = openai_input.OPTION_TYPES
    assert all(row.get(name) is None or isinstance(row[name], (int, float, list)) for name in source_types)


def write_lines(path: Path, count: int, *, blank_every: int = 7) -> None:
    with open(path, "wb") as file:
        file.write(b"\xef\xbb\xbf")
        for row in range(count):
            body = chat(model="a" if row % 2 else "SmolLM2-135M") if row % 3 else {"prompt": f"p{row}"}
            url = "/v1/chat/completions" if row % 3 else "/v1/completions"
            file.write(line(body, custom_id=f"c{row}", url=url) + (b"\r\n" if row % 5 else b"\n"))
            if row % blank_every == 0:
                file.write(b"  \n")


def test_rows_are_the_lines_that_are_not_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_input, "_INDEX_ROWS", 16)
    write_lines(tmp_path / "a.jsonl", 100)
    write_lines(tmp_path / "b.jsonl", 1)
    (tmp_path / "c.jsonl").write_bytes(b"\n\n")
    source = Source.open(JobConfig(inputs=(str(tmp_path),), model="SmolLM2-135M", output="o/"))
    assert (source.kind, source.num_rows, source.lists) == ("openai", 101, True)
    assert [file.rows for file in source.files] == [100, 1, 0]
    ids = [row["custom_id"] for batch in source.batches(0, 101) for row in batch.to_pylist()]
    assert ids == [*(f"c{row}" for row in range(100)), "c0"]
    for start, stop in [(0, 1), (15, 17), (47, 64), (99, 101), (100, 101)]:
        got = [row for batch in source.batches(start, stop, ["custom_id", "endpoint"]) for row in batch.to_pylist()]
        assert [row["custom_id"] for row in got] == ids[start:stop]
    work = [row for batch in source.work_batches(0, 101) for row in batch.to_pylist()]
    assert [row["prompt"] for row in work[:4]] == ["p0", None, None, "p3"]
    assert work[1]["messages"] == [{"role": "user", "content": "hi"}]
    assert [row["lora_id"] for row in work[:4]] == [None, "a", None, None]
    assert all((row["prompt"] is None) != (row["messages"] is None) for row in work)
    assert [batch.schema for batch in source.work_batches(0, 1)] == [source.work_schema]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_answers_are_openai_batch_lines(tmp_path: Path, logprobs: int | None) -> None:
    write_lines(tmp_path / "in.jsonl", 50)
    config = JobConfig(
        inputs=(str(tmp_path / "in.jsonl"),), model="SmolLM2-135M", rows_per_shard=20, logprobs=logprobs, n=2
    )  # fmt: skip
    assert default_output(config) == str(tmp_path / "in.generations.jsonl")
    data_job.run(config, stop_after=30, seed=1)
    assert data_job.run(config)["finished"]
    lines = [json.loads(text) for text in (tmp_path / "in.generations.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in lines] == [f"c{row}" for row in range(50)]
    assert len({one["id"] for one in lines}) == 50
    assert lines[7]["response"] is None
    assert lines[7]["error"] == {"code": "null_prompt", "message": "row has no prompt (answer)."}
    good = lines[8]
    assert (good["error"], good["response"]["status_code"]) == (None, 200)
    body = good["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "SmolLM2-135M")
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][1]["message"] == {"role": "assistant", "content": "answer 8.1 é"}
    assert body["choices"][0]["finish_reason"] == "stop"
    text = lines[6]["response"]["body"]
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "answer 6.0 é")
    if logprobs is None:
        assert body["choices"][0]["logprobs"] is None
    else:
        first = body["choices"][0]["logprobs"]["content"][0]
        assert (first["token"], first["logprob"], len(first["top_logprobs"])) == ("token_id:0", -0.5, 2)
        assert text["choices"][0]["logprobs"]["tokens"] == ["token_id:0", "token_id:1"]
        assert text["choices"][0]["logprobs"]["top_logprobs"][0] == {"token_id:0": 0.0, "token_id:1": -1.0}


def test_retry_of_json_lines(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 50)
    config = JobConfig(inputs=(str(tmp_path / "in.jsonl"),), model="SmolLM2-135M", rows_per_shard=20)
    data_job.run(config)
    before = (tmp_path / "in.generations.jsonl").read_text().splitlines()
    failed = [row for row in range(50) if row % 11 == 7]
    assert data_job.retry(config, still_bad=(18,)) == failed
    after = (tmp_path / "in.generations.jsonl").read_text().splitlines()
    assert [row for row in range(50) if before[row] != after[row]] == failed
    body = json.loads(after[7])["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "mended 7"
    assert json.loads(after[7])["custom_id"] == "c7"
    with JobState.open(config, data_job.BINDING, source=Source.open(config)) as state:
        assert state.success is not None
        assert (state.success.rows, state.success.errors) == (50, {"other": 1})
        tokens = sum(
            json.loads(text)["response"]["body"]["usage"]["completion_tokens"]
            for text in after
            if '"error":null' in text
        )
        assert state.success.completion_tokens == tokens
    assert data_job.retry(config) == [18]


def test_a_parquet_output_carries_id_and_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 20)
    config = JobConfig(inputs=(str(tmp_path / "in.jsonl"),), output=f"{tmp_path}/out.parquet")
    source = Source.open(config)
    with JobState.open(config, data_job.BINDING, source=source) as state:
        state.journal.append([data_job.result(row, config) for row in range(19)])
        state.journal.append([RowResult(19, None, error="bad_json: no.")])
        state.commit_ready()
        state.finish()
    got = pq.read_table(config.output)
    assert got.schema.names[:3] == ["custom_id", "line", "generation"]
    assert got["generation"].to_pylist()[1:3] == [["answer 1.0 é"], ["answer 2.0 é"]]
    assert json.loads(got["line"][5].as_py())["custom_id"] == "c5"


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 3)
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="mix Parquet and JSON lines"):
        Source.open(JobConfig(inputs=(str(tmp_path),), output="o/"))
    config = JobConfig(inputs=(str(tmp_path / "in.parquet"),), output=f"{tmp_path}/o.jsonl")
    with pytest.raises(UsageError, match=r"a \.jsonl output needs OpenAI batch input"):
        JobState.open(config, {}, source=Source.open(config))


def test_lines_that_change_during_the_run_are_not_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 40)
    source = Source.open(JobConfig(inputs=(str(tmp_path / "in.jsonl"),)))
    batches = source.batches(0, source.num_rows, batch_rows=8)
    next(batches)
    write_lines(tmp_path / "new.jsonl", 40)
    (tmp_path / "new.jsonl").replace(tmp_path / "in.jsonl")
    with pytest.raises(JobError, match=r"input .*in\.jsonl changed while the job ran"):
        list(source.batches(8, 40))
    with pytest.raises(JobError, match="changed while the job ran"):
        source.check_unchanged(0, 40)
