"""Hugging Face transformers with PEFT over rows of mixed adapters, as most scripts use them: the model is made here, of
random weights, in the very shape that is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from punica_batch.bench.shapes import SHAPES

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class HfPeft:
    """``adapters`` of them, numbered. Raises ``ImportError`` where transformers or peft is not installed."""

    def __init__(self, shape: str, dtype: torch.dtype, device: torch.device, rank: int, adapters: int) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        self._device = device
        with _made_as(dtype, device):
            config = LlamaConfig(**SHAPES[shape])
            lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=PROJECTIONS)
            # PEFT would keep adapters in float32 beside a model of half precision, which is slower
            model: Any = get_peft_model(LlamaForCausalLM(config), lora, "0", autocast_adapter_dtype=False)
            for number in range(1, adapters):
                model.add_adapter(str(number), lora)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero, to begin with
                    parameter.normal_(0, 0.02)
        self._model = model.to(dtype).eval()
        generation = self._model.base_model.model.generation_config
        generation.eos_token_id, generation.pad_token_id = None, 0

    def mixed(
        self, prompts: Sequence[NDArray[np.int32]], adapters: Sequence[int] | None, new: int, batch: int
    ) -> list[list[int]]:
        """New tokens of each row, greedy: static batches in row order, each row with its adapter (``adapter_names``).
        Prompts are of one length. ``adapters`` None: the base model."""
        answers: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            rows = slice(first, first + batch)
            if adapters is None:
                with self._model.disable_adapter():
                    answers += self._generate(prompts[rows], new)
            else:
                answers += self._generate(prompts[rows], new, adapter_names=[str(i) for i in adapters[rows]])
        return answers

    def loop(
        self, prompts: Sequence[NDArray[np.int32]], adapters: Sequence[int], new: int, batch: int
    ) -> list[list[int]]:
        """As ``mixed``, but adapter by adapter, each with static batches of its own rows."""
        answers: dict[int, list[int]] = {}
        for number in dict.fromkeys(adapters):
            self._model.set_adapter(str(number))
            rows = [i for i, own in enumerate(adapters) if own == number]
            for first in range(0, len(rows), batch):
                chosen = rows[first : first + batch]
                answers |= zip(chosen, self._generate([prompts[i] for i in chosen], new), strict=True)
        return [answers[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[NDArray[np.int32]], new: int, **options: Any) -> list[list[int]]:
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(self._device)
        output = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options
        )
        answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return answers


@contextmanager
def _made_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Modules that are made in the block have this dtype and are on this device from their first byte."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
