"""What one token adds to the text, for the two kinds of decoder that the supported models have.

*Byte-level* (GPT-2, Llama 3, Qwen): a token is a string of bytes; the text is their concatenation read as UTF-8.
*Metaspace with byte fallback* (SentencePiece: Llama 2, Mistral): a token is a piece of text, or ``<0xNN>``, one byte
of a character that the vocabulary lacks; bytes that follow each other form a run, and a run that is not UTF-8 comes
out as one U+FFFD for each byte.

A tokenizer with any other decoder is refused: its text could not be built token by token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any

from punica_batch.errors import ModelError

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_LEVEL = frozenset({"ByteLevel", "Fuse"})
_FALLBACK = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's ``bytes_to_unicode``, inverted)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def incomplete_tail(data: bytes) -> int:
    """How many bytes (0 to 3) at the end of ``data`` begin a UTF-8 character that they do not finish."""
    tail = data[-3:]
    return len(tail) - decode_finished(tail, "replace")[1]


def decode_finished(data: bytes, errors: str) -> tuple[str, int]:
    """``codecs.utf_8_decode`` up to a character that is not finished: the text, and of how many bytes it is.

    Python also waits after the first two bytes of a surrogate, which no third can make a character.
    """
    text, used = codecs.utf_8_decode(data, errors, False)
    is_surrogate = data[used : used + 1] == b"\xed" and data[used + 1 : used + 2] >= b"\xa0"
    return codecs.utf_8_decode(data, errors, True) if is_surrogate else (text, used)


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Which of the two kinds tokenizer.json's ``decoder`` is. Raises ``ModelError`` when it is neither."""
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds and _BYTE_LEVEL.issuperset(kinds):
        return True
    fused = kinds.index("Fuse") + 1 if "Fuse" in kinds else len(kinds)
    if _FALLBACK.issuperset(kinds) and all(
        step.get("type") == "Strip" and step.get("start", 0) <= 1 and not step.get("stop") for step in steps[fused:]
    ):
        return False
    names = "+".join(str(kind) for kind in kinds)
    raise ModelError(f"tokenizer.json: decoder {names} is not supported; use a ByteLevel or Metaspace/ByteFallback one")


class Pieces:
    """``backend``'s tokens one by one. Special tokens and unknown ids have no piece and are left out of all text."""

    def __init__(self, backend: Any, decoder: dict[str, Any] | None) -> None:
        self._backend = backend
        self.byte_level = is_byte_level(decoder)
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        steps = (decoder or {}).get("decoders", [decoder or {}])
        self._byte_fallback = any(step.get("type") == "ByteFallback" for step in steps)
        self._cache: dict[int, bytes | str | int | None] = {}
        if not self.byte_level:
            self._context = self._find_context()
            self._context_text = str(backend.decode([self._context]))
            space = backend.token_to_id("<0x20>")
            self.strips_leading_space = space is not None and backend.decode([space]) == ""

    def _find_context(self) -> int:
        """A token of plain text, to stand before another when its piece in mid-text is wanted."""
        for token_id in range(self._backend.get_vocab_size()):
            token = self._backend.id_to_token(token_id)
            if token and token.isalnum() and token_id not in self._special:
                return token_id
        raise ModelError("tokenizer.json: the vocabulary has no token of plain text")

    def piece(self, token_id: int) -> bytes | str | int | None:
        """What the token is in mid-text: ``bytes`` (byte-level), ``str``, an ``int`` (a byte of a run), or None."""
        try:
            return self._cache[token_id]
        except KeyError:
            piece = self._cache[token_id] = self._make(token_id)
            return piece

    def _make(self, token_id: int) -> bytes | str | int | None:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None or token_id in self._special:
            return None
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:  # an added token, written as it is
                return bytes(token, "utf-8")
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match:
            return int(match[1], 16)
        return str(self._backend.decode([self._context, token_id]))[len(self._context_text) :]

    def first_text(self, token_id: int) -> str:
        """The text of a token that is not a byte and stands first (some decoders drop its leading space)."""
        return str(self._backend.decode([token_id]))

    def cut_incomplete(self, token_ids: Iterable[int]) -> tuple[list[int], int]:
        """(ids to decode, U+FFFD to drop from the end), so that the text ends before a character left unfinished."""
        ids = [i for i in token_ids if self.piece(i) is not None]
        tail = b""
        for token_id in reversed(ids[-3:]):
            piece = self.piece(token_id)
            if isinstance(piece, str):
                break
            tail = (bytes([piece]) if isinstance(piece, int) else piece or b"") + tail
        missing = incomplete_tail(tail)
        if self.byte_level:
            return ids, int(missing > 0)
        return ids[: len(ids) - missing], 0
