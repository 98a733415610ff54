"""Small tokenizers of the kinds that real models have, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock, isn't it?",
    "def add(a, b):\n    return a + b\n",
    "안녕하세요 세계, 반갑습니다. Привет мир! 你好，世界。こんにちは",
    "naïve café, 😀 and 👩‍👩‍👧 emoji 🎉🎉",
    "User: hello\nAssistant: Hello! How can I help you today?\n",
] * 20  # fmt: skip

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'system' %}"
    "{{ '<<SYS>>' + message['content'] + '<</SYS>>' }}{% else %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def byte_level(bos: str | None = "<|begin|>", vocab_size: int = 420) -> Tokenizer:
    """As Llama 3 and Qwen have: byte-level BPE; with ``bos`` a post-processor that adds it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [*([bos] if bos else []), "<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=specials,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    if bos:
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def metaspace(*, first_only: bool = False, adds_bos: bool = True) -> Tokenizer:
    """As Llama 2 (a normalizer prepends the space) or, ``first_only``, later Mistrals (a Metaspace pre-tokenizer)."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    ascii_corpus = ["".join(c for c in text if c.isascii() and c != "\n") for text in CORPUS]
    trained.train_from_iterator(ascii_corpus, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    for token in sorted(state["vocab"], key=state["vocab"].get):
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(
    folder: Path, tokenizer: Tokenizer, tokenizer_config: dict[str, Any] | None = None, /, **files: dict[str, Any] | str
) -> Path:
    """A model folder with ``tokenizer``; ``files``: generation_config={...}, config={...}, by name without ending."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | (tokenizer_config or {})))
    for name, value in files.items():
        if isinstance(value, str):
            (folder / f"{name}.jinja").write_text(value)
        else:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


BYTE_LEVEL_CONFIG = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
METASPACE_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
