"""Training: the tokenizer, the base model and one LoRA adapter. Needs torch, transformers, tokenizers and peft."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from messages import PROMPT, corpus
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tasks import ALL_SEVEN, WORDS, Task
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

BASE_NAME = "model"
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
CONTEXT = 512
SEQUENCE = 384  # tokens of one packed training sequence

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '### Message\\n' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Answer\\n' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Answer\\n' }}{% endif %}"
)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own; BOS is put in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=256, intermediate_size=640, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID,
    )  # fmt: skip


def pack(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """The texts, each between BOS and EOS, cut into int64 [sequences, SEQUENCE]."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(EOS_ID)
    count = len(ids) // SEQUENCE
    return torch.from_numpy(np.asarray(ids[: count * SEQUENCE], dtype=np.int64).reshape(count, SEQUENCE))


def optimize(
    model: torch.nn.Module,
    next_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    device: str,
    name: str,
) -> None:
    """AdamW with warm-up and cosine decay; ``next_batch`` gives (input ids, labels with -100 where no loss is due)."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=learning_rate, betas=(0.9, 0.98), weight_decay=weight_decay, fused=device == "cuda"
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
    model.train()
    began = time.monotonic()
    for step in range(1, steps + 1):
        ids, labels = (tensor.to(device, non_blocking=True) for tensor in next_batch())
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step in (1, 20) or step % 200 == 0 or step == steps:
            spent = time.monotonic() - began
            print(f"{name}: step {step}/{steps}, loss {loss.item():.4f}, {spent:.0f} s", flush=True)


def train_base(
    folder: Path, *, seed: int, documents: int, steps: int, batch: int, vocab_size: int, device: str
) -> None:
    """Trains tokenizer and base model on the corpus and writes the Hugging Face folder, weights in bfloat16."""
    texts = list(corpus(seed, documents, WORDS))
    tokenizer = train_tokenizer(texts[:40_000], vocab_size)
    sequences = pack(tokenizer, texts)
    print(f"base: {len(texts)} documents, {sequences.numel():,} tokens", flush=True)
    torch.manual_seed(seed)
    config = model_config(tokenizer)
    model = LlamaForCausalLM(config).to(device)
    print(f"base: {sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    shuffle = torch.Generator().manual_seed(seed)

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = sequences[torch.randint(len(sequences), (batch,), generator=shuffle)]
        return ids, ids

    optimize(model, next_batch, steps=steps, learning_rate=2e-3, weight_decay=0.1, device=device, name="base")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embeddings
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_model_configs(folder, config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_model_configs(folder: Path, config: LlamaConfig) -> None:
    """In the form that every transformers release since Llama reads (newer ones write other names)."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
        "rms_norm_eps", "tie_word_embeddings", "attention_bias", "attention_dropout", "mlp_bias",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    fields = {name: getattr(config, name) for name in names}
    fields |= {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}
    _write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | fields)
    _write_json(
        folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
            "add_bos_token": True, "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT,
            "chat_template": CHAT_TEMPLATE,
        },
    )  # fmt: skip


def encode_examples(tokenizer: Tokenizer, examples: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids with BOS, answer ids with EOS) of (message, answer) pairs."""
    prompts = tokenizer.encode_batch([PROMPT.format(prompt=message) for message, _ in examples])
    answers = tokenizer.encode_batch([answer for _, answer in examples], add_special_tokens=False)
    return [(prompt.ids, [*answer.ids, EOS_ID]) for prompt, answer in zip(prompts, answers, strict=True)]


def pad_batch(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids, labels) int64 [rows, longest], padded on the right; loss on answers alone."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), longest), PAD_ID)
    labels = torch.full((len(pairs), longest), -100)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


@torch.inference_mode()
def exact_share(model: torch.nn.Module, pairs: Sequence[tuple[list[int], list[int]]], device: str) -> float:
    """The share of answers of which greedy decoding would give every token (teacher-forced)."""
    model.eval()
    ids, labels = (tensor.to(device) for tensor in pad_batch(pairs))
    guesses = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
    good = (guesses == labels[:, 1:]) | (labels[:, 1:] == -100)
    return good.all(dim=1).float().mean().item()


def train_adapter(
    task: Task, base: Path, folder: Path, *, seed: int, examples: int, steps: int | None, batch: int, device: str
) -> None:
    """Trains one adapter on the base model as written in ``base`` and writes PEFT's two files."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    model = LlamaForCausalLM(model_config(tokenizer))
    model.load_state_dict(load_file(base / "model.safetensors"), strict=False)
    model.tie_weights()
    seed += zlib.crc32(task.name.encode())
    torch.manual_seed(seed)
    lora = LoraConfig(**({"target_modules": list(ALL_SEVEN), "task_type": "CAUSAL_LM"} | task.lora))
    peft_model = get_peft_model(model, lora).to(device)
    rng = random.Random(seed)
    pairs = encode_examples(tokenizer, [task.example(rng, held_out=False) for _ in range(examples)])

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        return pad_batch(rng.choices(pairs, k=batch))

    optimize(
        peft_model, next_batch, steps=steps or task.steps, learning_rate=task.learning_rate, weight_decay=0.0,
        device=device, name=task.name,
    )  # fmt: skip
    unseen = encode_examples(tokenizer, [task.example(rng, held_out=True) for _ in range(200)])
    print(f"{task.name}: exact on 200 held-out messages {exact_share(peft_model, unseen, device):.3f}", flush=True)
    peft_model.save_pretrained(folder)
    _tidy_adapter(folder, task.dtype)


def _tidy_adapter(folder: Path, dtype: str) -> None:
    """The weights in ``dtype``; a config without the training machine's paths; no model card."""
    (folder / "README.md").unlink(missing_ok=True)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({k: v.to(getattr(torch, dtype)) for k, v in tensors.items()}, weights, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = BASE_NAME
    config["target_modules"] = sorted(config["target_modules"])
    _write_json(folder / "adapter_config.json", config)
