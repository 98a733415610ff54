"""What engine benchmarks run on: a model of random weights, a tokenizer of its vocabulary, adapter folders on disk."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from punica_batch.bench.shapes import SHAPES
from punica_batch.engine.build import assemble_engine, engine_kernels
from punica_batch.engine.engine import Engine
from punica_batch.engine.settings import DEFAULT_BATCHED_TOKENS, EngineSettings
from punica_batch.engine.startup import share_interpreter
from punica_batch.models.config import DTYPE_BYTES, ModelConfig
from punica_batch.models.llama import LlamaModel
from punica_batch.models.weights import RandomWeights, random_weights
from punica_batch.text.tokenizer import Tokenizer
from punica_batch.types import AdapterSpec, Dtype

FOLDERS = 8  # adapters on disk; a job's ids are spread over them, and each id is loaded on its own
# Slots beside the batch cap's: where each row has an adapter of its own, the next ones load while the batch runs.
SPARE_SLOTS = 16
_BLOCK_SIZE = 16
_ADAPTERS_SHARE = 0.4  # of a GPU's free memory, that adapter slots may take


@dataclass(frozen=True, slots=True)
class Workbench:
    """Made by ``workbench``. ``folders`` hold adapters of ``ranks``, in turn."""

    shape: str
    dtype: Dtype
    ranks: tuple[int, ...]
    model: LlamaModel
    tokenizer: Tokenizer
    folders: list[Path]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def adapter_bytes(self, number: int) -> int:
        """What adapter ``number`` of ranks in turn takes on the device, without padding."""
        return self.bytes_of_rank(self.ranks[number % FOLDERS % len(self.ranks)])

    def bytes_of_rank(self, rank: int) -> int:
        return self.config.lora_parameters(rank, layers_only=True) * DTYPE_BYTES[self.dtype]

    def step_tokens(self, cap: int) -> int:
        """Tokens of a step at most, as in a job that does not say how many."""
        return max(DEFAULT_BATCHED_TOKENS[self.model.device.type], cap)

    def specs(self, name: str, count: int, rank: int | None = None) -> dict[str, AdapterSpec]:
        """``count`` adapters called ``name``-0, ``name``-1, ..., all of one ``rank`` or of the ranks in turn."""
        all_ranks = [self.ranks[i % len(self.ranks)] for i in range(FOLDERS)]
        folders = [folder for folder, own in zip(self.folders, all_ranks, strict=True) if rank in (None, own)]
        names = [f"{name}-{i}" for i in range(count)]
        return {each: AdapterSpec(each, str(folders[i % len(folders)])) for i, each in enumerate(names)}

    def engine(
        self,
        *,
        cap: int,
        longest: int,
        adapters: dict[str, AdapterSpec],
        distinct: int,
        max_rank: int | None = None,
        batched_tokens: int | None = None,
        trust_stamps: bool = False,
    ) -> Engine:
        """An engine for rows of up to ``longest`` tokens that name ``adapters``, at most ``distinct`` of them in one
        load, of the ranks in turn or all of ``max_rank``; KV blocks for a full batch of them, or as many as fit. Every
        load digests its file, as several names share one, unless ``trust_stamps``: then only the first of a file."""
        device = self.model.device
        sizes = [self.bytes_of_rank(max_rank) if max_rank else self.adapter_bytes(i) for i in range(cap + SPARE_SLOTS)]
        slots = max(1, min(distinct, len(sizes)))
        if device.type == "cuda":
            room = int(torch.cuda.mem_get_info(device)[0] * _ADAPTERS_SHARE)
            slots = max(1, min(slots, room * len(sizes) // sum(sizes)))
        settings = EngineSettings(
            model="random", dtype=self.dtype, kv_cache_dtype=self.dtype, device=str(device),
            num_blocks=cap * -(-(longest + 1) // _BLOCK_SIZE), block_size=_BLOCK_SIZE, max_num_seqs=cap,
            max_num_batched_tokens=batched_tokens or self.step_tokens(cap), max_model_len=longest + 1, max_loras=slots,
            max_lora_rank=max_rank or max(self.ranks), max_lora_bytes=sum(sizes[:slots]),
            adapters=adapters, trust_stamps=trust_stamps,
        )  # fmt: skip
        engine = assemble_engine(self.model, self.tokenizer, settings)
        engine.warm_up()
        if device.type == "cuda":
            share_interpreter()
        return engine


@contextmanager
def workbench(
    shape: str,
    *,
    dtype: Dtype,
    device: torch.device,
    ranks: Sequence[int] = (16,),
    weights: RandomWeights = "normal",
    max_cap: int = 1024,
) -> Iterator[Workbench]:
    """For engines of up to ``max_cap`` rows at a time. Weights are made once and last as long as the block; so do the
    adapter files, which lie in memory where there is room (``/dev/shm``), as a page cache would hold them."""
    config = ModelConfig.from_dict(SHAPES[shape], where=f"shape {shape}")
    all_ranks = sum(ranks[i % len(ranks)] for i in range(FOLDERS))
    size = config.lora_parameters(all_ranks, layers_only=True) * DTYPE_BYTES[dtype]
    with tempfile.TemporaryDirectory(dir=memory_folder(size)) as root:
        settings = EngineSettings(
            model="random", dtype=dtype, kv_cache_dtype=dtype, device=str(device), num_blocks=1, max_model_len=1,
            max_num_seqs=max_cap, max_num_batched_tokens=max_cap,
        )  # fmt: skip
        kernels = engine_kernels(config, settings)
        model = random_weights(config, getattr(torch, dtype), device, kernels=kernels, values=weights)
        folders = write_adapters(Path(root), config, ranks, dtype, device)
        tokenizer = write_tokenizer(Path(root), config.vocab_size)
        yield Workbench(shape, dtype, tuple(ranks), model, tokenizer, folders)


def write_adapters(
    root: Path, config: ModelConfig, ranks: Sequence[int], dtype: Dtype, device: torch.device
) -> list[Path]:
    """``FOLDERS`` PEFT folders with random A and B on all seven projections of every layer."""
    modules = {name: size for name, size in config.lora_modules().items() if ".layers." in name}

    def write(i: int) -> Path:
        generator = torch.Generator(device=device).manual_seed(i)
        rank, folder, tensors = ranks[i % len(ranks)], root / f"adapter{i}", dict[str, torch.Tensor]()
        folder.mkdir()
        for name, (out, into) in modules.items():
            for letter, size in (("A", (rank, into)), ("B", (out, rank))):
                matrix = torch.empty(size, dtype=getattr(torch, dtype), device=device)
                matrix.normal_(0, 0.02, generator=generator)
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = matrix.cpu()
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        targets = sorted({name.rpartition(".")[2] for name in modules})
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(about | {"target_modules": targets}))
        return folder

    with ThreadPoolExecutor(FOLDERS) as pool:
        return list(pool.map(write, range(FOLDERS)))


def write_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Byte-level pieces, as many as the vocabulary has, so that a row's ids become text as in a job."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    strings = ("".join(piece) for n in itertools.count(1) for piece in itertools.product(letters, repeat=n))
    vocabulary = {piece: i for i, piece in enumerate(itertools.islice(strings, vocab_size))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer.load(folder)


def memory_folder(size: int) -> Path | None:
    """For temporary files of ``size`` bytes: a file system in memory where it has room, else None, the default."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * size:
        return memory
    return None
