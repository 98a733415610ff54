"""A model folder's tokenizer: text to ids with the beginning-of-sequence token exactly once, and ids to text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from punica_batch.errors import ModelError
from punica_batch.text.pieces import REPLACEMENT, Pieces

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BATCH_CHARS = 4 << 20  # encoded at a time: an encoding takes some 100 bytes a token


class Tokenizer:
    """Made by ``load``. Safe to use from one thread at a time.

    ``bos_token_id`` is None where the model has none. ``eos_token_ids`` end a row. ``special_tokens`` are the named
    ones (``bos_token``, ``eos_token``, ...) as templates see them. ``max_token_chars`` bounds how many characters of
    text one token can stand for. ``digest`` is the SHA-256 of all files that decide what text and ids mean.
    """

    def __init__(
        self, backend: Any, config: dict[str, Any], eos_token_ids: tuple[int, ...], digest: str, where: str = ""
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        _add_missing_tokens(backend, config, where)
        self._backend = backend
        self._encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
        self.special_tokens = _special_tokens(config)
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id: int | None = backend.token_to_id(self.bos_token) if self.bos_token else None
        own_eos = backend.token_to_id(self.eos_token) if self.eos_token else None
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *(() if own_eos is None else (own_eos,)))))
        vocab = backend.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocab), default=1)
        self.digest = digest
        self.pieces = Pieces(backend, json.loads(backend.to_str())["decoder"])
        self._prefix, self._suffix = self._find_affixes()
        if config.get("add_bos_token") and self.bos_token_id is not None and self.bos_token_id not in self._prefix:
            self._prefix.insert(0, self.bos_token_id)
        self.adds_bos = self.bos_token_id in self._prefix

    @classmethod
    def load(cls, folder: str | Path, model_folder: str | Path | None = None) -> Tokenizer:
        """Read ``folder``'s tokenizer files; EOS ids come from ``model_folder`` (default: the same folder).

        EOS ids are those of generation_config.json, or of config.json where it names none, and the tokenizer's own
        ``eos_token``. Raises ``ModelError``.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder}: no tokenizer.json; save the tokenizer with transformers' save_pretrained")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path}: not a tokenizer that this version of tokenizers reads: {error}") from error
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        eos = _eos_ids(Path(model_folder) if model_folder is not None else folder)
        return cls(backend, config, eos, _digest(folder, eos), str(folder))

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after a text."""
        for probe in ("a", "0", *self.special_tokens.values()):
            bare = self._backend.encode(probe, add_special_tokens=False).ids
            full = self._backend.encode(probe, add_special_tokens=True).ids
            for start in range(len(full) - len(bare) + 1):
                if bare and full[start : start + len(bare)] == bare:
                    return full[:start], full[start + len(bare) :]
        return [], []

    def encode_batch(self, texts: Sequence[str], *, templated: bool) -> list[NDArray[np.int32]]:
        """Ids of each text, int32 [length].

        A tokenizer that adds a BOS (by its post-processor or ``add_bos_token``) gives every text exactly one at its
        start, also a text that begins with the BOS token's own string, once or more. What else the post-processor
        adds (an EOS, say) is added to plain texts only: a template writes its own. Raises ``ValueError`` when a text
        holds a lone surrogate.
        """
        prefix, suffix = self._prefix, self._suffix
        if templated:
            suffix = []
            prefix = [self.bos_token_id] if self.adds_bos and self.bos_token_id is not None else []
        out: list[NDArray[np.int32]] = []
        for part in _parts(texts):
            try:
                encodings = self._encode(part, add_special_tokens=False)
            except TypeError as error:
                raise ValueError("a text is not valid Unicode") from error
            if prefix or suffix:
                out += [self._affix(e.ids, prefix, suffix) for e in encodings]
            else:
                out += [np.array(e.ids, np.int32) for e in encodings]
        return out

    def _affix(self, ids: list[int], prefix: list[int], suffix: list[int]) -> NDArray[np.int32]:
        start = len(prefix) if prefix and ids[: len(prefix)] == prefix else 0
        if self.adds_bos:
            while start < len(ids) and ids[start] == self.bos_token_id:
                start += 1
        return np.array([*prefix, *ids[start:], *suffix], np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the whole sequence, special tokens left out; ends before a character that was cut short."""
        ids, drop = self.pieces.cut_incomplete(int(i) for i in token_ids)
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text.removesuffix(REPLACEMENT) if drop else text

    def token(self, token_id: int) -> str:
        """The vocabulary's string for an id, special tokens included; "" for an unknown id."""
        return self._backend.id_to_token(token_id) or ""


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """``texts`` in order, in parts of bounded size."""
    start = chars = 0
    for end, text in enumerate(texts):
        chars += len(text)
        if chars > _BATCH_CHARS and end > start:
            yield texts[start:end]
            start, chars = end, len(text)
    if start < len(texts):
        yield texts[start:]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens; each is a string or an object with ``content``."""
    out = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            out[name] = content
    return out


def _add_missing_tokens(backend: Any, config: dict[str, Any], where: str) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks, as transformers does."""
    added = config.get("added_tokens_decoder") or {}
    for token_id, spec in sorted((int(i), spec) for i, spec in added.items()):
        token = AddedToken(**{k: spec[k] for k in spec if k in _ADDED_TOKEN_FIELDS})
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ModelError(
                f"{where}: tokenizer_config.json gives token {token.content!r} the id {token_id}, tokenizer.json "
                f"{backend.token_to_id(token.content)}; save the tokenizer again with transformers"
            )


_ADDED_TOKEN_FIELDS = frozenset({"content", "single_word", "lstrip", "rstrip", "normalized", "special"})


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelError(f"{folder / name}: eos_token_id must be an integer or a list of them")
        if ids:
            return tuple(ids)
    return ()


def _digest(folder: Path, eos: tuple[int, ...]) -> str:
    digest = hashlib.sha256(json.dumps(eos).encode())
    for name in _TOKENIZER_FILES:
        path = folder / name
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "-"
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()
