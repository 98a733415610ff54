"""vLLM over the same rows, where it is installed: offline, its defaults, random weights of the same shape."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from punica_batch.bench.shapes import SHAPES
from punica_batch.bench.workbench import FOLDERS, Workbench

_MEMORY_SHARE = 0.6  # of the GPU: the model that is measured beside it stays there


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


class VllmPeer:
    """To be used as a context, on the first GPU, which is the only one that vLLM takes by itself. Adapter number n is
    folder n of the workbench's, in turn, under an id of its own."""

    def __init__(self, bench: Workbench, *, batch: int, longest: int) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        self._request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        self._folders = bench.folders
        self._model = tempfile.TemporaryDirectory()
        (Path(self._model.name) / "config.json").write_text(json.dumps(SHAPES[bench.shape]))
        self._llm = self._vllm.LLM(
            model=self._model.name, load_format="dummy", skip_tokenizer_init=True, dtype=bench.dtype, enable_lora=True,
            max_loras=batch, max_lora_rank=max(bench.ranks), max_num_seqs=batch, max_model_len=longest + 1,
            enable_prefix_caching=False, gpu_memory_utilization=_MEMORY_SHARE,
        )  # fmt: skip

    def __enter__(self) -> VllmPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._llm
        self._model.cleanup()

    def generate(self, prompts: Sequence[NDArray[np.int32]], adapters: Sequence[int] | None, new: int) -> None:
        """``new`` tokens for each prompt, greedy, EOS ignored. ``adapters`` None: the base model."""
        requests = None
        if adapters is not None:
            requests = [self._request(f"a{n}", n + 1, str(self._folders[n % FOLDERS])) for n in adapters]
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        self._llm.generate(inputs, params, lora_request=requests, use_tqdm=False)
