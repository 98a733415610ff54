"""Templates of jobs and adapters around rows: what they read, what they cost, and how they fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_helpers import codes, make, run, texts
from text_helpers import BYTE_LEVEL_CONFIG, CHATML, LLAMA2_CHAT, METASPACE_CONFIG, byte_level, metaspace, save
from transformers import AutoTokenizer

from punica_batch.errors import InputError
from punica_batch.text.prompt_template import PromptTemplate
from punica_batch.text.templates import check_text
from punica_batch.types import AdapterSpec

SYSTEM = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% if 0 %}x{% endif %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("m"), byte_level(), BYTE_LEVEL_CONFIG | {"chat_template": CHATML})


def test_prompt_in_a_template_is_the_prompt_column_whatever_its_name(folder: Path) -> None:
    specs = {"a": AdapterSpec("a", "x", prompt_template="Q {prompt}")}
    preparer = make(folder, adapters=specs, prompt_column="text")
    assert texts(preparer, run(preparer, text=["t"], lora_id=["a"])) == ["Q t"]
    assert texts(preparer, run(preparer, text=["t"], prompt=["p"], lora_id=["a"])) == ["Q p"], "its own comes first"
    check_text(preparer._settings, ["text"], ["a"])
    prepared = run(preparer, body=["t"], lora_id=["a"], __error__=pa.nulls(1, pa.string()))
    (failed,) = prepared.errors
    assert str(failed.error).startswith("template_failed: ")
    assert "__error__" not in str(failed.error)


def test_only_a_near_name_is_proposed() -> None:
    with pytest.raises(InputError, match=r"'prompt'; did you mean \{promt\}\?"):
        PromptTemplate("{prompt}").sources(["promt"], "text")
    with pytest.raises(InputError, match=r"'prompt'; there are id, priority"):
        PromptTemplate("{prompt}").sources(["priority", "id"], "text")


def test_when_a_prompt_becomes_a_message(folder: Path) -> None:
    specs = {
        "plain": AdapterSpec("plain", "x"),
        "system": AdapterSpec("system", "x", system_prompt="Be brief."),
        "own": AdapterSpec("own", "x", chat_template=SYSTEM),
    }
    lora_id = ["plain", "system", "own"]
    chatml = "<|im_start|>"

    def starts(**changes: Any) -> list[str]:
        preparer = make(folder, adapters=specs, **changes)
        requests = run(preparer, prompt=["hi"] * 3, lora_id=lora_id).requests
        return ["".join(map(preparer.tokenizer.token, request.prompt_token_ids[1:])) for request in requests]

    assert starts() == ["hi", f"{chatml}systemĊBeĠbrief.<|im_end|>Ċ{chatml}userĊhi<|im_end|>Ċ{chatml}assistantĊ",
                        "user:hi;"]  # fmt: skip
    assert starts(apply_chat_template=True)[0] == f"{chatml}userĊhi<|im_end|>Ċ{chatml}assistantĊ"
    assert starts(apply_chat_template=False) == ["hi"] * 3


def test_a_template_with_its_own_bos_gets_no_second(tmp_path: Path) -> None:
    folder = save(tmp_path, metaspace(), METASPACE_CONFIG | {"chat_template": LLAMA2_CHAT})
    talk = [{"role": "user", "content": "the fox"}]
    prepared = run(make(folder), messages=[talk])
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, return_dict=False)
    assert prepared.requests[0].prompt_token_ids.tolist() == theirs
    assert theirs.count(1) == 1


def test_adapters_have_their_own_templates(folder: Path) -> None:
    specs = {
        "x": AdapterSpec("x", "x", prompt_template="X {prompt} {{}}"),
        "sys": AdapterSpec("sys", "x", system_prompt="S", chat_template=SYSTEM, prompt_template="[{title}]"),
        "broken": AdapterSpec("broken", "x", chat_template="{% for %}"),
        "column": AdapterSpec("column", "x", prompt_template="{titel}"),
        "option": AdapterSpec("option", "x", max_tokens=0),
    }
    preparer = make(folder, adapters=specs, prompt_template="J {prompt}")
    prepared = run(preparer, prompt=["p"] * 6, title=["t"] * 6, lora_id=[None, *specs])
    assert texts(preparer, prepared) == ["J p", "X p {}", "system:S;user:[t];"]
    assert codes(prepared) == {3: "template_failed", 4: "template_failed", 5: "bad_option"}
    assert "title" in str(prepared.errors[1].error)


def test_a_slow_template_costs_its_rows_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from punica_batch.text import chat

    monkeypatch.setattr(chat.ChatTemplate.__init__, "__kwdefaults__",
                        chat.ChatTemplate.__init__.__kwdefaults__ | {"max_seconds": 0.05})  # fmt: skip
    specs = {"slow": AdapterSpec("slow", "x", chat_template=LOOP), "a": AdapterSpec("a", "x")}
    prepared = run(make(folder, adapters=specs), prompt=["p"] * 40, lora_id=["slow", "a"] * 20)
    assert codes(prepared) == dict.fromkeys(range(0, 40, 2), "template_timeout")
    assert len(prepared.requests) == 20


def test_no_chat_template_at_all(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), BYTE_LEVEL_CONFIG)
    preparer = make(folder)
    prepared = run(preparer, messages=[[{"role": "user", "content": "x"}]])
    assert codes(prepared) == {0: "template_failed"}
    with pytest.raises(InputError, match="--chat-template"):
        check_text(replace(preparer._settings, is_messages=True), ["messages", "id"], [None])
    check_text(preparer._settings, ["prompt", "messages"], [None])


def test_what_is_checked_before_any_work(folder: Path) -> None:
    specs = {
        "good": AdapterSpec("good", "x", prompt_template="{title}"),
        "typo": AdapterSpec("typo", "x", prompt_template="{titel}"),
        "broken": AdapterSpec("broken", "x", chat_template="{% if %}"),
    }
    base = make(folder, adapters=specs)._settings
    columns = ["prompt", "title"]
    check_text(base, columns, [None, "good", "unknown"])
    with pytest.raises(InputError, match=r"'typo'.*'titel'.*\{title\}"):
        check_text(base, columns, ["typo"])
    with pytest.raises(InputError, match=r"'broken'.*line 1"):
        check_text(base, columns, ["broken"])
    with pytest.raises(InputError, match=r"--prompt-template.*'promt'.*\{prompt\}"):
        check_text(replace(base, prompt_template="{promt}"), columns, [None])


@pytest.mark.parametrize("source", ["{", "}", "a {} b", "{prompt", "prompt}", "{{prompt}", "{a{b}}"])
def test_prompt_templates_that_do_not_parse(source: str) -> None:
    with pytest.raises(InputError, match="--prompt-template"):
        PromptTemplate(source)


def test_a_prompt_template_reads_columns_and_nothing_else() -> None:
    for source in ("{prompt.__class__}", "{prompt[0]}", "{prompt!r}", "{prompt:>10}", "{0}"):
        with pytest.raises(InputError, match="no column"):
            PromptTemplate(source).sources(["prompt"], "prompt")
    template = PromptTemplate("{{{a}}} {b c}{a} {{x}}\n")
    assert template.sources(["b c", "a"], "prompt") == ("a", "b c")
    assert template.columns == ("a", "b c")
    assert template.render(["{b c}", "2"]) == "{{b c}} 2{b c} {x}\n"


PARTS = st.one_of(st.sampled_from(["{{", "}}", "{x}"]), st.text(st.characters(exclude_characters="{}")))


@given(st.lists(PARTS))
def test_prompt_templates_agree_with_str_format(parts: list[str]) -> None:
    source = "".join(parts)
    template = PromptTemplate(source)
    assert template.render(["<v>"] * len(template.columns)) == source.format(x="<v>")


def test_values_of_other_types_in_a_prompt_template(folder: Path) -> None:
    preparer = make(folder, prompt_template="{i} {f} {b} {l} {d}")
    prepared = run(preparer, i=[1, 2], f=[1.5, None], b=[True, False], l=[["é"], []],
                   d=pa.array([19000, 1], pa.date32()))  # fmt: skip
    assert texts(preparer, prepared) == ['1 1.5 True ["é"] 2022-01-08']
    assert codes(prepared) == {1: "null_prompt"}
    assert "'f'" in str(prepared.errors[0].error)
