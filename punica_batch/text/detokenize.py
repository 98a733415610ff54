"""Stop strings, exactly: across tokens, inside one, and never half a character.

``StopStream`` follows one sample as its tokens come and says at which token the text first holds a stop string;
``finish_text`` makes the text of a sample that has ended. Both see the same text, ``Tokenizer.decode`` of the tokens
so far, so the stream never ends a row whose text holds no stop string, nor runs past one.
"""

from __future__ import annotations

from collections.abc import Sequence

from punica_batch.text.pieces import REPLACEMENT, decode_finished, incomplete_tail
from punica_batch.text.tokenizer import Tokenizer


def find_stop(text: str, stop: Sequence[str]) -> int:
    """Where the earliest of the stop strings begins in ``text``; -1 when none is there."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return min(found, default=-1)


def finish_text(tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str]) -> str:
    """The sample's text, cut before its earliest stop string.

    A character of which the last tokens hold only some bytes is left out, whatever ended the row.
    """
    text = tokenizer.decode(token_ids)
    at = find_stop(text, stop)
    return text if at < 0 else text[:at]


class StopStream:
    """One sample's stop strings. Work for a token is bounded by its own text and the longest stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._pieces = tokenizer.pieces
        self._stop = stop
        self._keep = max(map(len, stop), default=1) - 1
        self._push = self._push_bytes if self._pieces.byte_level else self._push_fallback
        self._tail = ""  # the end of the text so far: what a stop string may have begun in
        self._pending = b""  # byte-level: the bytes of an unfinished character
        self._is_first = True  # nothing but special tokens has come
        self._run = bytearray()  # byte fallback: the bytes since the last token of text
        self._run_tail = ""  # the tail as it was before the run
        self._run_length = 0  # characters of the run that are in the text
        self._run_is_valid = True
        self._run_strips = False  # the run stands first and its leading space is dropped

    def push(self, token_id: int) -> bool:
        """Take the next token; True when the text up to and with it holds a stop string."""
        piece = self._pieces.piece(token_id)
        return piece is not None and self._push(token_id, piece)

    def _extend(self, new: str) -> bool:
        text = self._tail + new
        self._tail = text[len(text) - self._keep :] if 0 < self._keep < len(text) else text if self._keep else ""
        return bool(new) and any(s in text for s in self._stop)

    def _push_bytes(self, token_id: int, piece: bytes | str | int) -> bool:
        assert isinstance(piece, bytes)
        data = self._pending + piece
        new, used = decode_finished(data, "replace")
        self._pending = data[used:]
        return self._extend(new)

    def _push_fallback(self, token_id: int, piece: bytes | str | int) -> bool:
        first, self._is_first = self._is_first, False
        if isinstance(piece, int):
            if not self._run:
                self._begin_run(first)
            self._run.append(piece)
            return self._extend_run()
        assert isinstance(piece, str)
        found = bool(self._run) and self._close_run()
        return self._extend(self._pieces.first_text(token_id) if first else piece) or found

    def _begin_run(self, first: bool) -> None:
        self._run_tail, self._run_length, self._run_is_valid = self._tail, 0, True
        self._run_strips, self._pending = first and self._pieces.strips_leading_space, b""

    def _extend_run(self) -> bool:
        """The run's last byte is new. Once the run is no UTF-8 its whole text turns into U+FFFD, one a byte."""
        if self._run_is_valid:
            data = self._pending + self._run[-1:]
            try:
                new, used = decode_finished(data, "strict")
            except UnicodeDecodeError:
                return self._spoil_run()
            self._pending = data[used:]
            if self._run_strips and new:
                new, self._run_strips = new.removeprefix(" "), False
            return self._extend(new)
        return self._grow_spoiled(len(self._run) - incomplete_tail(bytes(self._run[-3:])))

    def _spoil_run(self) -> bool:
        self._run_is_valid, self._tail, self._run_length = False, self._run_tail, 0
        return self._grow_spoiled(len(self._run) - incomplete_tail(bytes(self._run[-3:])))

    def _grow_spoiled(self, length: int) -> bool:
        new, self._run_length = length - self._run_length, max(length, self._run_length)
        return self._extend(REPLACEMENT * new)

    def _close_run(self) -> bool:
        """A token of text ends the run: an unfinished character in it is now final."""
        is_spoiled = not self._run_is_valid or bool(self._pending)
        if self._run_is_valid and is_spoiled:
            self._run_is_valid, self._tail, self._run_length = False, self._run_tail, 0
        found = is_spoiled and self._grow_spoiled(len(self._run))
        self._run.clear()
        return found
