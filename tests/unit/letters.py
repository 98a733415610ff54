"""A tokenizer for tests of the engine, whose text can be told from its tokens."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import tokenizers

from punica_batch.text.tokenizer import Tokenizer


@functools.cache
def letters() -> Tokenizer:
    """A real one in which token i is the letter i of the alphabet."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={chr(97 + i): i for i in range(26)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        backend.save(str(Path(folder, "tokenizer.json")))
        return Tokenizer.load(folder)
