from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_helpers import BYTE_LEVEL_CONFIG, CORPUS, METASPACE_CONFIG, byte_level, metaspace, save
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers import AutoTokenizer

from punica_batch.errors import ModelError
from punica_batch.text.tokenizer import Tokenizer

KINDS = {
    "byte-level": (byte_level, BYTE_LEVEL_CONFIG),
    "byte-level without BOS": (lambda: byte_level(None), {"eos_token": "<|end|>"}),
    "llama-2": (metaspace, METASPACE_CONFIG),
    "metaspace first": (lambda: metaspace(first_only=True), METASPACE_CONFIG),
}
TEXTS = [*CORPUS[:5], "", " ", "  two  spaces ", "a", "<|im_start|>user\nhi<|im_end|>", "\x00\n\t", "<tool call> x"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    make, config = KINDS[request.param]
    folder = save(tmp_path_factory.mktemp("model"), make(), config)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def test_plain_ids_are_those_of_transformers(pair) -> None:
    ours, theirs = pair
    ids = ours.encode_batch(TEXTS, templated=False)
    assert [i.tolist() for i in ids] == theirs(TEXTS)["input_ids"]
    assert all(i.dtype == np.int32 for i in ids)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)


@given(st.text(max_size=40))
def test_any_text_is_encoded_and_decoded_as_transformers_does(pair, text: str) -> None:
    ours, theirs = pair
    ids = ours.encode_batch([text], templated=False)[0].tolist()
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("templated", [False, True])
def test_bos_is_there_exactly_once(tmp_path: Path, templated: bool) -> None:
    for make, config in (KINDS["byte-level"], KINDS["llama-2"]):
        tokenizer = Tokenizer.load(save(tmp_path / config["bos_token"].strip("<|>"), make(), config))
        bos = config["bos_token"]
        for text in ("hello", f"{bos}hello", f"{bos}{bos}hello", bos):
            ids = tokenizer.encode_batch([text], templated=templated)[0].tolist()
            assert ids.count(tokenizer.bos_token_id) == 1
            assert ids[0] == tokenizer.bos_token_id
        one, two = tokenizer.encode_batch(["hello", f"{bos}hello"], templated=templated)
        assert one.tolist() == two.tolist()


def test_a_tokenizer_without_bos_gets_none_and_keeps_what_the_text_has(tmp_path: Path) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}  # as SmolLM2: named, not added
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(None), config))
    start = tokenizer.bos_token_id
    plain, chat, twice = tokenizer.encode_batch(
        ["user", "<|im_start|>user", "<|im_start|><|im_start|>user"], templated=True
    )
    assert start not in plain
    assert chat.tolist() == [start, *plain]
    assert twice.tolist() == [start, start, *plain]


def test_add_bos_token_of_the_config_is_honoured(tmp_path: Path) -> None:
    without = Tokenizer.load(save(tmp_path / "a", metaspace(adds_bos=False), METASPACE_CONFIG))
    added = Tokenizer.load(save(tmp_path / "b", metaspace(adds_bos=False), METASPACE_CONFIG | {"add_bos_token": True}))
    both = Tokenizer.load(save(tmp_path / "c", metaspace(), METASPACE_CONFIG | {"add_bos_token": True}))
    (plain,), (one,), (same,) = (t.encode_batch(["a fox"], templated=False) for t in (without, added, both))
    assert one.tolist() == same.tolist() == [1, *plain.tolist()]


def test_an_eos_from_the_post_processor_goes_to_plain_texts_only(tmp_path: Path) -> None:
    from tokenizers import processors

    backend = metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer.load(save(tmp_path, backend, METASPACE_CONFIG))
    (plain,), (chat,) = (tokenizer.encode_batch(["a fox"], templated=t) for t in (False, True))
    assert plain.tolist() == [*chat.tolist(), 2]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ["<|end|>"]),
        ({"config": {"eos_token_id": 7}}, [7, "<|end|>"]),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 8]}}, [9, 8, "<|end|>"]),
        ({"config": {"eos_token_id": [7, 7]}, "generation_config": {"top_p": 0.9}}, [7, "<|end|>"]),
        ({"generation_config": {"eos_token_id": 1}}, [1]),  # 1 is <|end|> itself
    ],
)
def test_eos_ids(tmp_path: Path, files: dict, ids: list) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(), BYTE_LEVEL_CONFIG, **files))
    end = Backend.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|end|>")
    assert end == 1
    assert list(tokenizer.eos_token_ids) == [end if i == "<|end|>" else i for i in ids]


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    tokenizer = Tokenizer.load(save(tmp_path, backend, BYTE_LEVEL_CONFIG))
    ids = tokenizer.encode_batch(["x", "The quick brown fox jumps over the lazy dog"], templated=False)
    assert len(ids[0]) == 2
    assert len(ids[1]) > 4


def test_order_survives_the_splitting_of_large_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(), BYTE_LEVEL_CONFIG))
    texts = [f"text number {i} " * (i % 5) for i in range(100)]
    whole = tokenizer.encode_batch(texts, templated=False)
    monkeypatch.setattr("punica_batch.text.tokenizer._BATCH_CHARS", 50)
    parts = tokenizer.encode_batch(texts, templated=False)
    assert [i.tolist() for i in parts] == [i.tolist() for i in whole]
    assert tokenizer.encode_batch([], templated=False) == []


def test_added_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    backend = byte_level()
    next_id = len(backend.get_vocab())
    added = {str(next_id): {"content": "<|extra|>", "special": True}}
    folder = save(tmp_path / "a", backend, BYTE_LEVEL_CONFIG | {"added_tokens_decoder": added})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode_batch(["<|extra|>"], templated=False)[0][-1] == next_id
    assert tokenizer.decode([next_id]) == ""
    wrong = {str(next_id + 5): {"content": "<|extra|>", "special": True}}
    folder = save(tmp_path / "b", byte_level(), BYTE_LEVEL_CONFIG | {"added_tokens_decoder": wrong})
    with pytest.raises(ModelError, match="extra"):
        Tokenizer.load(folder)


def test_the_digest_follows_every_file_that_matters(tmp_path: Path) -> None:
    def digest(**changes: object) -> str:
        folder = save(tmp_path / str(len(list(tmp_path.iterdir()))), byte_level(), BYTE_LEVEL_CONFIG, **changes)
        return Tokenizer.load(folder).digest

    base = digest()
    assert digest() == base
    assert digest(config={"hidden_size": 3}) == base  # the model's business
    others = [digest(chat_template="{{ x }}"), digest(generation_config={"eos_token_id": 5}),
              digest(special_tokens_map={"pad_token": "<|end|>"})]  # fmt: skip
    assert len({base, *others}) == 4


@pytest.mark.parametrize("break_it", ["missing", "not json", "wrong decoder", "eos", "config"])
def test_a_bad_folder_is_a_model_error(tmp_path: Path, break_it: str) -> None:
    backend = byte_level()
    if break_it == "wrong decoder":
        backend.decoder = decoders.WordPiece()
    folder = save(tmp_path, backend, BYTE_LEVEL_CONFIG)
    if break_it == "missing":
        (folder / "tokenizer.json").unlink()
    if break_it == "not json":
        (folder / "tokenizer.json").write_text("{")
    if break_it == "eos":
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "2"}))
    if break_it == "config":
        (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_a_lone_surrogate_is_a_value_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(), BYTE_LEVEL_CONFIG))
    with pytest.raises(ValueError, match="Unicode"):
        tokenizer.encode_batch(["fine", "\ud800"], templated=False)
