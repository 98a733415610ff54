"""Tiny random models and PEFT adapters, Hugging Face's answers for them, and ours, teacher-forced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from punica_batch.engine.build import build_engine
from punica_batch.engine.engine import Engine
from punica_batch.engine.settings import EngineSettings
from punica_batch.scheduler.batch import BatchArrays, build_arrays
from punica_batch.scheduler.scheduler import Scheduler, SchedulerConfig
from punica_batch.scheduler.sequence import Sequence as EngineSequence
from punica_batch.types import AdapterSpec, Request, RowResult, SamplingParams

Row = tuple[str | None, list[int]]  # adapter, token ids

VOCAB = 264  # 256 bytes and 8 special tokens
BOS, EOS = 256, 257
SPECIAL = ["<s>", "</s>", *(f"<extra{i}>" for i in range(6))]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip

ARCHITECTURES: dict[str, PretrainedConfig] = {
    "llama2": LlamaConfig(**COMMON, num_key_value_heads=4),
    "llama31": LlamaConfig(
        **COMMON, num_key_value_heads=2,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=12),
    "qwen2": Qwen2Config(**COMMON | {"tie_word_embeddings": True}, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32),
    "smollm": LlamaConfig(**COMMON | {"tie_word_embeddings": True, "num_attention_heads": 8}, num_key_value_heads=4),
}  # fmt: skip


def randomise(parameters: Any, seed: int, std: float = 0.12) -> None:
    """Every parameter away from its special start: norms from 1, biases and PEFT's B from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in parameters:
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.copy_(1 + 0.3 * noise if "norm" in name else std * noise)


def save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass
class TinyModel:
    """A saved model with adapters; ``hf`` holds the same weights in float32."""

    folder: Path
    hf: Any
    adapters: dict[str, AdapterSpec]

    @classmethod
    def make(cls, root: Path, config: PretrainedConfig, seed: int = 0) -> TinyModel:
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        randomise(hf.named_parameters(), seed)
        folder = root / "model"
        hf.save_pretrained(folder)
        save_tokenizer(folder)
        return cls(folder, hf, {})

    def add_adapter(self, name: str, seed: int, **options: Any) -> None:
        """A PEFT adapter with random A and B, saved as PEFT saves it; entries of scale * B A are about 0.05, whatever
        the rank (the base's are 0.12): felt, but not so strong that rounding grows without bounds."""
        options = {"r": 8, "lora_alpha": 16, "target_modules": ALL} | options
        rank = options["r"]
        std = (0.05 / (options["lora_alpha"] / rank * rank**0.5)) ** 0.5
        peft = get_peft_model(self.fresh(), LoraConfig(task_type="CAUSAL_LM", **options))
        changed = [(n, p) for n, p in peft.named_parameters() if "lora_" in n]
        assert changed
        randomise(changed, seed, std)
        path = self.folder.parent / "adapters" / name
        peft.save_pretrained(path)
        self.adapters[name] = AdapterSpec(name=name, path=str(path))

    def fresh(self, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation=attention).eval()

    @torch.no_grad()
    def reference(
        self, rows: Sequence[Row], dtype: torch.dtype = torch.float32, attention: str = "eager"
    ) -> list[Tensor]:
        """Hugging Face's logits of every position, float32 [len, V] a row, each row alone."""
        with self.hf_model(dtype, attention) as answer:
            return [answer(lora_id, torch.tensor([ids]))[0].float() for lora_id, ids in rows]

    @contextmanager
    def hf_model(self, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Iterator[Any]:
        """A function (lora_id, input ids [1, n]) -> logits [1, n, V]."""
        base = self.fresh(dtype, attention)
        peft: Any = None
        for name, spec in self.adapters.items():
            if peft is None:
                peft = PeftModel.from_pretrained(base, spec.path, adapter_name=name, autocast_adapter_dtype=False)
            else:
                peft.load_adapter(spec.path, adapter_name=name, autocast_adapter_dtype=False)

        def answer(lora_id: str | None, ids: Tensor) -> Tensor:
            if peft is None:
                return base(ids).logits
            if lora_id is None:
                with peft.disable_adapter():
                    return peft(input_ids=ids).logits
            peft.set_adapter(lora_id)
            return peft(input_ids=ids).logits

        yield answer

    def tolerance(self, rows: Sequence[Row]) -> float:
        """max(1e-4, twice the spread between HF's own eager and sdpa), over these rows in float32."""
        pairs = zip(self.reference(rows), self.reference(rows, attention="sdpa"), strict=True)
        return max(1e-4, 2 * max(float((a - b).abs().max()) for a, b in pairs))

    def settings(self, **options: Any) -> EngineSettings:
        defaults: dict[str, Any] = {
            "num_blocks": 200, "block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512,
            "max_model_len": 256, "max_loras": max(len(self.adapters), 1),
        }  # fmt: skip
        return EngineSettings(model=str(self.folder), adapters=dict(self.adapters), **defaults | options)

    def engine(self, **options: Any) -> Engine:
        return build_engine(self.settings(**options))


def teacher_forced(engine: Engine, rows: Sequence[Row], prompt_lens: Sequence[int]) -> list[Tensor]:
    """Our logits of every position, float32 [len, V] a row: prompts prefilled (chunked to the engine's budget), the
    rest decoded one token a step with the given tokens, all rows in one batch."""
    s = engine.settings
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=s.num_blocks, block_size=s.block_size, max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens, max_model_len=s.max_model_len, max_loras=s.max_loras,
        ),
        engine.lora_store,
    )  # fmt: skip
    sequences: dict[int, EngineSequence] = {}
    for i, ((lora_id, ids), prompt_len) in enumerate(zip(rows, prompt_lens, strict=True)):
        params = SamplingParams(max_tokens=len(ids) - prompt_len + 1)
        request = Request(i, np.array(ids[:prompt_len], np.int32), lora_id, params)
        sequences[i] = EngineSequence(request)
        scheduler.add(sequences[i])
    logits = [torch.full((len(ids), VOCAB), float("nan")) for _, ids in rows]
    while scheduler.num_running or scheduler.num_waiting:
        engine.lora_store.poll()
        batch = scheduler.schedule()
        if batch is None:
            engine.lora_store.wait(1.0)
            continue
        arrays = build_arrays(batch, s.block_size)
        step = all_logits(engine, arrays)
        for k, sequence in enumerate(arrays.sequences):
            rows_of = slice(int(arrays.qo_indptr[k]), int(arrays.qo_indptr[k + 1]))
            logits[sequence.request.row][torch.from_numpy(arrays.positions[rows_of])] = step[rows_of]
        following = [[*rows[q.request.row][1], EOS][q.num_tokens] for q in batch.sampled]
        ended = [q for q in batch.sampled if q.num_tokens == len(rows[q.request.row][1])]
        scheduler.advance(batch)
        for sequence, token in zip(batch.sampled, following, strict=True):
            sequence.take(token)
        for sequence in ended:
            scheduler.finish(sequence)
        scheduler.check_integrity()
    return logits


def all_logits(engine: Engine, arrays: BatchArrays) -> Tensor:
    """Those of every row of a step, float32 [T, vocab]: as if each were sampled from."""
    rows = np.diff(arrays.qo_indptr).tolist()
    asked = replace(
        arrays, logits_rows=np.arange(arrays.num_tokens), logits_seg_indptr=arrays.seg_indptr,
        logits_segment_lora_ids=arrays.segment_lora_ids,
        sampled=[s for s, count in zip(arrays.sequences, rows, strict=True) for _ in range(count)],
    )  # fmt: skip
    with torch.inference_mode():
        return engine.runner._logits(asked)[0].float().cpu()


def max_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """inf where anything is NaN."""
    worst = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    return float("inf") if any(np.isnan(worst)) else max(worst)


def mean_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return float(torch.cat([(a - b).abs().flatten() for a, b in zip(ours, theirs, strict=True)]).mean())


def random_rows(adapters: Sequence[str | None], lengths: Sequence[int], seed: int = 0) -> list[Row]:
    random = np.random.default_rng(seed)
    return [(a, [BOS, *random.integers(0, 256, n - 1).tolist()]) for a, n in zip(adapters, lengths, strict=True)]


def generate(engine: Engine, requests: Sequence[Request]) -> dict[int, RowResult]:
    """Runs the requests to their ends; each row's result, exactly one of each, every invariant checked in each step."""
    for request in requests:
        engine.add(request)
    results: dict[int, RowResult] = {}
    while engine.has_work:
        for result in engine.step():
            assert result.row not in results
            results[result.row] = result
        engine.check_integrity()
    assert set(results) == {request.row for request in requests}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    return results


def requests_of(rows: Sequence[Row], *, first: int = 0, **sampling: Any) -> list[Request]:
    params = SamplingParams(**sampling)
    return [Request(i, np.array(ids, np.int32), lora_id, params) for i, (lora_id, ids) in enumerate(rows, first)]


def tokens(result: RowResult) -> list[list[int]]:
    assert result.error is None, result.error
    return [list(c.token_ids) for c in result.completions]
