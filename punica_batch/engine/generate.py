"""The engine in the caller's process, for the Python API: a table in, the same rows with their generations out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import torch

from punica_batch.adapters.registry import Registry
from punica_batch.config import JobConfig
from punica_batch.data.columns import find_work_columns, to_work
from punica_batch.data.schema import carried_schema, has_lists, output_schema, result_schema, results_to_batch
from punica_batch.engine.build import build_engine
from punica_batch.engine.kernel_cache import kernel_environment
from punica_batch.engine.memory import GRAPH_BYTES, activation_bytes
from punica_batch.engine.settings import DEFAULT_BATCHED_TOKENS, DEFAULT_MAX_LORA_RANK, EngineSettings, resolve_dtypes
from punica_batch.errors import JobError, UsageError
from punica_batch.models.config import DTYPE_BYTES, ModelConfig, resolve_model
from punica_batch.planner.memory import ADAPTER_SHARE, MAX_BATCH, memory_plan
from punica_batch.text.prepare import Preparer
from punica_batch.text.settings import TextSettings
from punica_batch.types import RowResult

_BATCH_ROWS = 2048
_MAX_LORAS = 16


class Engine:
    """A model with its adapters, loaded once, for any number of tables.

    >>> with Engine(JobConfig(model="model", adapters="adapters", max_tokens=32)) as engine:
    ...     answers = engine.generate(pa.table({"prompt": ["Hello"], "lora_id": ["greeter"]}))

    ``config`` says what it says for ``run_job``; what concerns files and processes (inputs, output, resume, workers)
    has no effect. ``device`` "auto" is the first CUDA device if torch finds one. Raises what ``run_job`` raises for a
    model, tokenizer or registry that cannot be used.
    """

    def __init__(self, config: JobConfig) -> None:
        if config.model is None:
            raise UsageError("no model is named: JobConfig(model=...)")
        self._config = config
        folder = resolve_model(config.model, config.revision)
        tokenizer_folder = folder if config.tokenizer is None else resolve_model(config.tokenizer, kind="tokenizer")
        registry = Registry.open(config)
        specs = {name: registry.get(name) for name in registry.names()}
        self._templates = [spec.prompt_template for spec in specs.values() if spec.prompt_template is not None]
        model = ModelConfig.from_folder(folder)
        settings = _settings(config, model, folder, tokenizer_folder, registry, len(specs))
        self._preparer = Preparer(
            TextSettings.from_config(
                config, model_folder=folder, tokenizer_folder=tokenizer_folder,
                max_model_len=settings.max_model_len, adapters=specs,
            )
        )  # fmt: skip
        self._engine = build_engine(settings)
        self._is_closed = False

    def generate(self, rows: Any) -> Any:
        """``rows`` (a pyarrow Table or polars DataFrame) with the output columns of the run command, in its order.

        Row i is row number i of the random streams, as in a file. A bad row gets its ``error``; with
        ``on_error="raise"`` it raises ``JobError``. Raises ``InputError`` for columns that are missing, mistyped or
        would be hidden, ``UsageError`` for another kind of table and for an engine that is closed.
        """
        if self._is_closed:
            raise UsageError("the Engine is closed: call generate inside its `with` block, or make another")
        table = _to_arrow(rows)
        config = self._config
        schema = output_schema(table.schema, config)
        results: dict[int, RowResult] = {}
        for result in self._results(table):
            if result.error is not None and config.on_error == "raise":
                raise JobError(f"row {result.row}: {result.error}")
            results[result.row] = result
        lists = has_lists(table.schema, config)
        batch = results_to_batch([results[i] for i in range(table.num_rows)], result_schema(config, lists=lists))
        carried = table.select(carried_schema(table.schema, config).names)
        output = pa.Table.from_arrays([*carried.columns, *map(_chunked, batch.columns)], schema=schema)
        return _to_polars(output) if _is_polars(rows) else output

    def close(self) -> None:
        """Ends the threads that load adapters; no table can be run after it."""
        self._is_closed = True
        self._engine.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _results(self, table: pa.Table) -> Iterator[RowResult]:
        """Each row's result once, as they end; texts are prepared while the engine has less than a batch to do."""
        work = find_work_columns(
            table.schema, self._config, [*self._templates, *filter(None, [self._config.prompt_template])],
            frozenset(self._config.model_fields_set), "the table",
        )  # fmt: skip
        preparer = self._preparer.reading(work.is_messages)
        first_row = 0
        try:
            for batch in table.select(work.names).to_batches(max_chunksize=_BATCH_ROWS):
                prepared = preparer.prepare(to_work(batch, work), first_row)
                first_row += batch.num_rows
                yield from prepared.errors
                for request in prepared.requests:
                    self._engine.add(request)
                while self._engine.stats().waiting > _BATCH_ROWS:
                    yield from self._engine.step()
            while self._engine.has_work:
                yield from self._engine.step()
        finally:  # a caller that goes away in the middle leaves nothing behind
            for row in range(first_row):
                self._engine.abort(row)


def _settings(
    config: JobConfig, model: ModelConfig, folder: Path, tokenizer_folder: Path, registry: Registry, num_adapters: int
) -> EngineSettings:
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # before Triton and FlashInfer are asked for anything
        os.environ.update(kernel_environment(None))
    dtypes = resolve_dtypes(config, model.torch_dtype, device)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise UsageError(f"max_model_len {max_model_len} is beyond the model's own {model.max_position_embeddings}")
    batched_tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device]
    max_num_seqs = config.max_num_seqs or min(MAX_BATCH, batched_tokens)
    total, weights = int(_memory_bytes(device) * config.gpu_memory_utilization), model.weight_bytes(dtypes.model)
    rank = config.max_lora_rank or DEFAULT_MAX_LORA_RANK
    largest = model.lora_parameters(rank) * DTYPE_BYTES[dtypes.model]
    adapter_bytes = min(max(0, total - weights) // ADAPTER_SHARE, num_adapters * largest)
    memory = memory_plan(
        total_bytes=total - adapter_bytes,
        weight_bytes=weights,
        workspace_bytes=activation_bytes(model, batched_tokens, max_num_seqs, dtypes.model)
        + (GRAPH_BYTES if device == "cuda" else 0),
        kv_bytes_per_block=model.kv_bytes_per_block(config.block_size, dtypes.kv_cache),
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched_tokens,
        # rows are not known: too many of them at a time cost preemptions, too few the GPU's time
        max_num_seqs=max_num_seqs,
    )
    return EngineSettings(
        model=str(folder), tokenizer=str(tokenizer_folder), device=device,
        dtype=dtypes.model, kv_cache_dtype=dtypes.kv_cache,
        num_blocks=memory.num_blocks, block_size=config.block_size, max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=batched_tokens, max_model_len=max_model_len,
        max_loras=config.max_loras or max(1, min(num_adapters, _MAX_LORAS)),
        max_lora_rank=rank, max_lora_bytes=adapter_bytes or None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        adapters={name: registry.get(name) for name in registry.names()},
        storage_options=registry.storage_options, seed=config.seed,
    )  # fmt: skip


def _memory_bytes(device: str) -> int:
    """What the engine may plan with: the GPU's free memory, or half of the machine's (the caller has data there)."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _to_arrow(rows: Any) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if _is_polars(rows):
        return rows.to_arrow()
    raise UsageError(f"rows must be a pyarrow Table or a polars DataFrame, not {type(rows).__name__}")


def _is_polars(rows: Any) -> bool:
    """Without importing polars, which is no dependency: who has a DataFrame of it has imported it."""
    return type(rows).__module__.partition(".")[0] == "polars" and type(rows).__name__ == "DataFrame"


def _to_polars(table: pa.Table) -> Any:
    import polars

    return polars.from_arrow(table)


def _chunked(array: pa.Array) -> pa.ChunkedArray:
    return pa.chunked_array([array])
