from __future__ import annotations

import time
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_helpers import BYTE_LEVEL_CONFIG, METASPACE_CONFIG, byte_level, metaspace, save
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode

from punica_batch.text.detokenize import StopStream, finish_text
from punica_batch.text.tokenizer import Tokenizer

KINDS = {"byte-level": (byte_level, BYTE_LEVEL_CONFIG), "llama-2": (metaspace, METASPACE_CONFIG)}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Backend]:
    make, config = KINDS[request.param]
    folder = save(tmp_path_factory.mktemp("model"), make(), config)
    return Tokenizer.load(folder), Backend.from_file(str(folder / "tokenizer.json"))


ALPHABET = bytes_to_unicode()
BYTES = {char: byte for byte, char in ALPHABET.items()}


def brute_force_text(backend: Backend, ids: list[int]) -> str:
    """The oracle: the library's text, less the character that the last bytes begin and do not finish."""
    special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    ids = [i for i in ids if i not in special and backend.id_to_token(i) is not None]
    tokens = [backend.id_to_token(i) for i in ids]
    if not is_fallback(backend):
        text = backend.decode(ids)
        return text[:-1] if unfinished(b"".join(map(token_bytes, tokens))) else text
    run = b""
    for token in reversed(tokens):
        if not (token.startswith("<0x") and len(token) == 6):
            break
        run = bytes([int(token[3:5], 16)]) + run
    return backend.decode(ids[: len(ids) - unfinished(run)])


def is_fallback(backend: Backend) -> bool:
    return backend.token_to_id("<0x00>") is not None


@lru_cache(maxsize=10_000)
def unfinished(data: bytes) -> int:
    """How many bytes at the end of ``data`` some further bytes would make a character of."""
    for size in range(1, min(3, len(data)) + 1):
        tail = data[-size:]
        if tail[0] & 0xC0 == 0x80:
            continue
        for first in (b"\x80", b"\x90", b"\xa0"):
            for more in (b"", b"\x80", b"\x80\x80"):
                try:
                    (tail + first + more).decode()
                except UnicodeDecodeError:
                    continue
                return size
        return 0
    return 0


def token_bytes(token: str) -> bytes:
    try:
        return bytes(BYTES[char] for char in token)
    except KeyError:
        return token.encode()


STOPS = ["the", "e", " ", ". ", "o", "é", "😀", "안", "\ufffd", "\ufffd\ufffd", "ab", "<tool call>", "A", "ee", "x"]


@st.composite
def token_ids(draw: st.DrawFn) -> list[tuple[str, object]]:
    piece = st.one_of(
        st.tuples(st.just("id"), st.integers(0, 500)),
        st.tuples(st.just("byte"), st.integers(0, 255)),
        st.tuples(st.just("text"), st.sampled_from(["the fox", "é😀", "안녕 e", "  x", "ee. ", "Ab", "👩‍👩‍👧"])),
        st.tuples(st.just("cut"), st.sampled_from(["é", "😀", "안"])),
    )
    return draw(st.lists(piece, max_size=14))


def to_ids(backend: Backend, pieces: list[tuple[str, object]]) -> list[int]:
    """Pieces as ids: any id, a byte's token, a text's tokens, or a character's bytes but the last."""

    def byte(value: int) -> int:
        return backend.token_to_id(f"<0x{value:02X}>" if is_fallback(backend) else ALPHABET[value])

    out: list[int] = []
    for kind, value in pieces:
        if kind == "id":
            out.append(value)  # type: ignore[arg-type]
        elif kind == "byte":
            out.append(byte(value))  # type: ignore[arg-type]
        elif kind == "text":
            out += backend.encode(value, add_special_tokens=False).ids
        else:
            out += [byte(b) for b in str(value).encode()[:-1]]
    return out


@settings(max_examples=200, deadline=None)
@given(token_ids(), st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True))
@example([("byte", 0x20), ("byte", 0x41)], ["A", " "])
@example([("text", "😀"), ("byte", 0xE2), ("byte", 0x41)], ["\ufffd\ufffd"])
@example([("byte", 0xFF), ("byte", 0xE2), ("byte", 0x98), ("id", 300)], ["\ufffd\ufffd"])
@example([("byte", 0xED), ("byte", 0xA0)], ["\ufffd\ufffd"])
def test_stops_are_found_at_the_earliest_token_and_cut_exactly(pair, pieces, stop: list[str]) -> None:
    tokenizer, backend = pair
    ids = to_ids(backend, pieces)
    earliest = next(
        (n for n in range(1, len(ids) + 1) if any(s in brute_force_text(backend, ids[:n]) for s in stop)), None
    )
    stream = StopStream(tokenizer, tuple(stop))
    found = next((n for n, token_id in enumerate(ids, 1) if stream.push(token_id)), None)
    assert found == earliest
    used = ids[:found]
    text = brute_force_text(backend, used)
    cut = min((text.find(s) for s in stop if s in text), default=len(text))
    assert finish_text(tokenizer, used, tuple(stop)) == text[:cut]


@settings(max_examples=200, deadline=None)
@given(token_ids())
@example([("byte", 0xED), ("byte", 0xA0)])  # a surrogate's beginning: no bytes to come make a character of it
def test_decode_is_the_librarys_but_for_an_unfinished_end(pair, pieces) -> None:
    tokenizer, backend = pair
    ids = to_ids(backend, pieces)
    assert tokenizer.decode(ids) == brute_force_text(backend, ids)


@pytest.mark.parametrize("text", ["😀", "안녕하세요", "x é", "👩‍👩‍👧 ok", "日本語"])
def test_a_text_cut_anywhere_never_shows_half_a_character(pair, text: str) -> None:
    tokenizer, backend = pair
    ids = backend.encode(text, add_special_tokens=False).ids
    for end in range(len(ids) + 1):
        part = tokenizer.decode(ids[:end])
        assert "\ufffd" not in part
        assert text.startswith(part)
    assert tokenizer.decode(ids) == text


def test_a_replacement_character_that_the_model_wrote_stays(pair) -> None:
    tokenizer, backend = pair
    ids = backend.encode("ok \ufffd", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "ok \ufffd"
    assert tokenizer.decode(ids[:-1]) == "ok "


def test_stop_inside_and_across_tokens(pair) -> None:
    tokenizer, backend = pair
    ids = backend.encode("The quick brown fox jumps over", add_special_tokens=False).ids
    for stop in ("row", "fox j", "k brown f", "quick", "ver"):
        stream = StopStream(tokenizer, (stop,))
        end = next(n for n, i in enumerate(ids, 1) if stream.push(i))
        assert finish_text(tokenizer, ids[:end], (stop,)) == "The quick brown fox jumps over".split(stop)[0]
        assert stop not in tokenizer.decode(ids[: end - 1])


def test_special_tokens_are_not_text(pair) -> None:
    tokenizer, backend = pair
    ids = backend.encode("The fox", add_special_tokens=False).ids
    end = tokenizer.eos_token_ids[0]
    stream = StopStream(tokenizer, ("fox", tokenizer.eos_token))
    pushed = [stream.push(i) for i in (end, *ids[:-1], end)]
    assert not any(pushed[:1])
    assert finish_text(tokenizer, [*ids, end], ()) == "The fox"


def test_the_work_a_token_takes_does_not_grow(pair) -> None:
    """Four times the tokens take some four times as long; decoding everything anew would take sixteen."""
    tokenizer, backend = pair
    unit = backend.encode("안녕하세요😀", add_special_tokens=False).ids  # one long run of bytes

    def seconds(copies: int) -> float:
        stream = StopStream(tokenizer, ("never there",))
        start = time.process_time()
        for token_id in unit * copies:
            assert not stream.push(token_id)
        return time.process_time() - start

    seconds(10)
    small = min(seconds(1000) for _ in range(3))
    assert min(seconds(4000) for _ in range(3)) < 9 * small


def test_unknown_ids_are_left_out(pair) -> None:
    tokenizer, backend = pair
    ids = backend.encode("fox", add_special_tokens=False).ids
    assert tokenizer.decode([*ids, 10_000_000]) == "fox"
    assert not StopStream(tokenizer, ("x",)).push(10_000_000)
