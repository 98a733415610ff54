from __future__ import annotations

import pickle
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_helpers import codes, make, run, texts
from text_helpers import BYTE_LEVEL_CONFIG, CHATML, byte_level, save
from transformers import AutoTokenizer

from punica_batch.adapters.registry import Registry
from punica_batch.config import JobConfig
from punica_batch.errors import RowError
from punica_batch.text.prepare import Prepared, Preparer, render_preview
from punica_batch.text.settings import TextSettings
from punica_batch.types import AdapterSpec, SamplingParams

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SYSTEM = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("m"), byte_level(), BYTE_LEVEL_CONFIG | {"chat_template": CHATML})


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_prompts_are_tokenized_as_transformers_does(folder: Path, hf: Any) -> None:
    prompts = ["hello", "  two words ", "안녕 😀", "<|begin|>x"]
    prepared = run(make(folder), 100, prompt=prompts, lora_id=["a", None, "", "a"])
    assert not prepared.errors
    assert [r.row for r in prepared.requests] == [100, 101, 102, 103]
    expected = hf(prompts[:3])["input_ids"] + [hf("x")["input_ids"]]
    assert [r.prompt_token_ids.tolist() for r in prepared.requests] == expected
    assert [r.lora_id for r in prepared.requests] == ["a", None, None, "a"]
    assert all(r.prompt_token_ids.dtype == np.int32 for r in prepared.requests)
    assert prepared.requests[0].sampling == replace(JobConfig().sampling(), max_tokens=197)  # the context's end


TEXT_KINDS = [
    pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_string()),
]  # fmt: skip


@pytest.mark.parametrize("kind", TEXT_KINDS, ids=str)
def test_any_kind_of_text_column(folder: Path, kind: pa.DataType) -> None:
    values = ["one", None, "two", "one"]
    array = pa.array(values, kind) if kind == pa.string_view() else pa.array(values).cast(kind)
    lora_id = pa.array([None, "a", "a", "b"]).cast(pa.dictionary(pa.int32(), pa.string()))
    preparer = make(folder)
    prepared = run(preparer, prompt=array, lora_id=lora_id)
    assert codes(prepared) == {1: "null_prompt"}
    assert texts(preparer, prepared) == ["one", "two", "one"]
    assert [r.lora_id for r in prepared.requests] == [None, "a", "b"]


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_invalid_utf8_costs_its_row_only(folder: Path, kind: str) -> None:
    raw = pa.array([b"fine", b"half \xe2\x98", None, b"also fine"], pa.binary())
    array = raw.cast(pa.large_binary()).view(pa.large_string()) if kind == "large_string" else raw.view(pa.string())
    if kind == "dictionary":
        array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 3], pa.int32()), array)
    preparer = make(folder)
    prepared = run(preparer, prompt=array)
    assert codes(prepared) == {1: "invalid_utf8", 2: "null_prompt"}
    assert texts(preparer, prepared) == ["fine", "also fine"]


def test_invalid_utf8_in_messages_and_ids_costs_its_row_only(folder: Path) -> None:
    bad = pa.array([b"ok", b"\xff", b"ok"]).view(pa.string())
    struct = pa.StructArray.from_arrays([pa.array(["user"] * 3), bad], ["role", "content"])
    messages = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), struct)
    assert codes(run(make(folder), messages=messages)) == {1: "invalid_utf8"}
    assert codes(run(make(folder), prompt=["x"] * 3, lora_id=bad)) == {0: "unknown_adapter", 1: "invalid_utf8",
                                                                       2: "unknown_adapter"}  # fmt: skip
    assert codes(run(make(folder), prompt=["x"] * 3, stop=bad)) == {1: "invalid_utf8"}
    surrogate, fine = (f'[{{"role": "user", "content": "{text}"}}]' for text in ("\\ud800", "fine"))
    assert codes(run(make(folder), messages=[surrogate, fine])) == {0: "invalid_utf8"}


def test_empty_and_missing_prompts(folder: Path) -> None:
    prepared = run(make(folder), prompt=["", None, " ", "<|begin|>"])
    assert codes(prepared) == {0: "empty_prompt", 1: "null_prompt"}
    assert [r.row for r in prepared.requests] == [2, 3]
    assert codes(run(make(folder), prompt=pa.nulls(2))) == {0: "null_prompt", 1: "null_prompt"}
    assert codes(run(make(folder), other=[1])) == {0: "null_prompt"}
    assert run(make(folder), prompt=pa.array([], pa.string())) == Prepared([], [])


def test_an_empty_prompt_in_a_template_is_text(folder: Path) -> None:
    preparer = make(folder, prompt_template="Say: {prompt}")
    assert texts(preparer, run(preparer, prompt=[""])) == ["Say: "]
    assert not codes(run(make(folder, apply_chat_template=True), prompt=[""]))


def test_adapters_known_unknown_and_refused(folder: Path) -> None:
    preparer = make(folder, adapter_errors={"bad": "adapter_refused: use_dora is not supported"})
    prepared = run(preparer, prompt=["x"] * 5, lora_id=["a", "nope", "bad", None, "../a"])
    assert codes(prepared) == {1: "unknown_adapter", 2: "adapter_refused", 4: "unknown_adapter"}
    assert prepared.errors[1].error == "adapter_refused: use_dora is not supported"


def test_the_readers_errors_come_first(folder: Path) -> None:
    prepared = run(make(folder), prompt=["x", None, "x"], lora_id=["nope", None, None],
                   __error__=[None, "bad_json: line 2 is not an object", "odd"])  # fmt: skip
    assert codes(prepared) == {0: "unknown_adapter", 1: "bad_json", 2: "input_error"}


def test_a_prompt_fits_with_one_token_more(folder: Path) -> None:
    preparer = make(folder, max_model_len=10, sampling=SamplingParams(max_tokens=4))
    prepared = run(preparer, prompt=["x" * n for n in range(1, 12)])  # one token a letter and a BOS
    by_row = {r.row: (r.num_prompt_tokens, r.sampling.max_tokens) for r in prepared.requests}
    assert by_row == {0: (2, 4), 1: (3, 4), 2: (4, 4), 3: (5, 4), 4: (6, 4), 5: (7, 3), 6: (8, 2), 7: (9, 1)}
    assert codes(prepared) == {8: "prompt_too_long", 9: "prompt_too_long", 10: "prompt_too_long"}
    assert [e.prompt_tokens for e in prepared.errors] == [10, 11, 12]


def test_truncate_left_keeps_the_bos_and_the_end(folder: Path) -> None:
    preparer = make(folder, max_model_len=10, overlong="truncate-left", sampling=SamplingParams(max_tokens=3))
    prepared = run(preparer, prompt=["x" * 8, "y" * 9 + "zk", "x" * 5000], max_tokens=[None, None, 300])
    assert not prepared.errors
    fits, cut, capped = prepared.requests
    assert (fits.num_prompt_tokens, fits.sampling.max_tokens) == (9, 1)
    assert (cut.num_prompt_tokens, cut.sampling.max_tokens) == (7, 3)
    assert cut.prompt_token_ids[0] == preparer.tokenizer.bos_token_id
    assert preparer.tokenizer.decode(cut.prompt_token_ids) == "yyyyzk"
    assert (capped.num_prompt_tokens, capped.sampling.max_tokens) == (5, 5)


def test_cells_that_cannot_fit_are_not_tokenized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preparer = make(folder)
    seen: list[int] = []
    encode = preparer.tokenizer.encode_batch
    monkeypatch.setattr(preparer.tokenizer, "encode_batch", lambda t, **k: seen.extend(map(len, t)) or encode(t, **k))
    prepared = run(preparer, prompt=["x" * (17 << 20), "ok", "word " * 100_000])
    assert codes(prepared) == {0: "prompt_too_long", 2: "prompt_too_long"}
    assert seen == [2]


def test_precedence_of_options(folder: Path) -> None:
    job = SamplingParams(max_tokens=50, temperature=0.5, stop=("JOB",), logprobs=2)
    prepared = run(make(folder, sampling=job), prompt=["x"] * 4, lora_id=[None, "b", "b", "a"],
                   max_tokens=[None, None, 7, None], stop=pa.array([None, None, ["ROW"], []], pa.list_(pa.string())),
                   seed=[None, 3, None, 2**40], temperature=[None, 1.5, None, 0])  # fmt: skip
    assert [r.sampling for r in prepared.requests] == [
        job,
        replace(job, max_tokens=9, stop=("END",), seed=3, temperature=1.5),
        replace(job, max_tokens=7, stop=("ROW",)),
        replace(job, seed=2**40, temperature=0.0, stop=()),
    ]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", float("nan")), ("max_tokens", "5"), ("max_tokens", True),
        ("max_tokens", float("inf")), ("temperature", float("nan")), ("temperature", -1.0), ("temperature", "hot"),
        ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2.0), ("n", 0),
        ("n", 5000), ("stop", ""), ("stop", ["a", ""]), ("stop", ["a", None]), ("seed", 1.5), ("stop", 3),
        ("temperature", Decimal("NaN")), ("top_p", None),
    ],
)  # fmt: skip
def test_a_wrong_option_costs_its_row_only(folder: Path, column: str, value: object) -> None:
    array = pa.array([None, value]) if not isinstance(value, Decimal) else pa.array([None, float("nan")])
    prepared = run(make(folder), prompt=["x", "x"], **{column: array})
    if value is None:
        assert not prepared.errors
        return
    assert codes(prepared) == {1: "bad_option"}
    assert f"'{column}'" in str(prepared.errors[0].error)


def test_options_of_other_number_types(folder: Path) -> None:
    prepared = run(make(folder), prompt=["x"], max_tokens=pa.array([3.0]), top_k=pa.array([4], pa.uint8()),
                   temperature=pa.array([Decimal("0.25")]), stop=pa.array(["a"]).dictionary_encode())  # fmt: skip
    assert prepared.requests[0].sampling == SamplingParams(max_tokens=3, top_k=4, temperature=0.25, stop=("a",))


def test_messages_go_through_the_chat_template(folder: Path, hf: Any) -> None:
    talk = [{"role": "user", "content": "hi 😀"}, {"role": "assistant", "content": "yes?"}]
    preparer = make(folder)
    prepared = run(preparer, messages=[talk, None, []], prompt=[None, "plain", None])
    assert codes(prepared) == {2: "bad_messages"}
    ids = hf.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    bos = preparer.tokenizer.bos_token_id
    assert prepared.requests[0].prompt_token_ids.tolist() == [bos, *ids]
    assert prepared.requests[1].prompt_token_ids.tolist() == hf("plain")["input_ids"]


def test_a_row_with_a_prompt_and_messages_is_refused(folder: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    prepared = run(make(folder), messages=[talk, talk, None], prompt=["x", None, None])
    assert codes(prepared) == {0: "bad_messages", 2: "null_prompt"}


def test_only_the_chosen_kind_of_column_is_read(folder: Path) -> None:
    """A template may name the other column: that makes it text, and no chat."""
    talk = [{"role": "user", "content": "hi"}]
    specs = {"a": AdapterSpec("a", "x", prompt_template="{prompt}: {messages}")}
    columns = {"messages": [talk], "prompt": ["said"], "lora_id": ["a"]}
    preparer = make(folder, adapters=specs, is_messages=False)
    assert texts(preparer, run(preparer, **columns)) == ['said: [{"role": "user", "content": "hi"}]']
    (text,) = texts(preparer.reading(True), run(preparer.reading(True), **columns))
    assert "hi" in text
    assert "said" not in text


@pytest.mark.parametrize("is_messages", [True, None])
def test_null_messages_are_no_prompt_whatever_the_adapters_template_says(
    folder: Path, is_messages: bool | None
) -> None:
    specs = {"a": AdapterSpec("a", "x", prompt_template="Q {prompt}")}
    preparer = make(folder, adapters=specs, is_messages=is_messages)
    columns = {"chat": pa.array([None], MESSAGES), "lora_id": ["a"], "__error__": pa.nulls(1, pa.string())}
    prepared = run(Preparer(replace(preparer._settings, messages_column="chat")), **columns)
    assert [result.error for result in prepared.errors] == ["null_prompt: column 'chat' is null"]


def test_the_first_tokens_of_a_rendered_row(folder: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"prompt": ["one", "two words", None]})
    preparer = make(folder)
    preview = render_preview(preparer, batch, 1, 3)
    assert len(preview) == 3
    assert preview[0] == (preparer.tokenizer.bos_token_id, "<|begin|>")
    with pytest.raises(RowError, match="null_prompt"):
        render_preview(preparer, batch, 2)


def test_settings_travel(folder: Path) -> None:
    config = JobConfig(chat_template=SYSTEM, overlong="truncate-left", prompt_column="q", n=3, stop=("x",))
    made = TextSettings.from_config(config, model_folder=folder, max_model_len=99)
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made
    assert (copy.chat_template, copy.prompt_column, copy.sampling.n, copy.sampling.stop) == (SYSTEM, "q", 3, ("x",))
    assert Preparer(copy).prepare(pa.RecordBatch.from_pydict({"q": ["hi"]}), 0).requests


CELL = st.one_of(st.none(), st.just(b""), st.text(max_size=30).map(str.encode), st.binary(max_size=6),
                 st.just(b"x" * 400))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CELL, st.sampled_from([None, "", "a", "b", "zz"]), st.sampled_from([None, 1, 0, 500])),
                max_size=12), st.integers(0, 10**9))  # fmt: skip
def test_every_row_comes_out_once_and_as_if_alone(folder: Path, rows: list[tuple], first: int) -> None:
    preparer = make(folder)

    def batch(part: list[tuple]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [pa.array([r[0] for r in part], pa.binary()).view(pa.string()),
             pa.array([r[1] for r in part], pa.string()), pa.array([r[2] for r in part], pa.int64())],
            ["prompt", "lora_id", "max_tokens"],
        )  # fmt: skip

    prepared = preparer.prepare(batch(rows), first)
    out = {r.row: ("ok", r.prompt_token_ids.tolist(), r.lora_id, r.sampling) for r in prepared.requests}
    out |= {r.row: ("error", r.error, r.prompt_tokens) for r in prepared.errors}
    assert len(prepared.requests) + len(prepared.errors) == len(rows)
    assert sorted(out) == list(range(first, first + len(rows)))
    for index, row in enumerate(rows):
        alone = preparer.prepare(batch([row]), first + index)
        (solo,) = [("ok", r.prompt_token_ids.tolist(), r.lora_id, r.sampling) for r in alone.requests] + [
            ("error", r.error, r.prompt_tokens) for r in alone.errors
        ]
        assert out[first + index] == solo
        if row[0]:
            try:
                row[0].decode()
            except UnicodeDecodeError:
                assert solo[0] == "error"


def test_an_unknown_adapter_is_told_as_the_registry_tells_it(folder: Path) -> None:
    """Whoever meets the name first: the registry before a job, the text process in it."""
    specs = {name: AdapterSpec(name, "p") for name in ("good", "other")}
    for name in ("god", "n" * 300, "zzz"):
        (failed,) = run(make(folder, adapters=specs), prompt=["x"], lora_id=[name]).errors
        with pytest.raises(RowError) as refused:
            Registry(specs).get(name)
        assert failed.error == str(refused.value)
    (failed,) = run(make(folder, adapters={}, adapter_errors={}), prompt=["x"], lora_id=["god"]).errors
    with pytest.raises(RowError) as refused:
        Registry({}).get("god")
    assert (
        failed.error
        == str(refused.value)
        == ("unknown_adapter: no adapters are named: give --adapters or --lora-modules")
    )
