"""A job's inputs, registry and model, opened: what every command that looks at a job begins with. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from punica_batch.adapters.registry import Registry
from punica_batch.config import JobConfig
from punica_batch.data.schema import output_schema
from punica_batch.data.source import Source
from punica_batch.errors import UsageError
from punica_batch.models.config import ModelConfig, resolve_model
from punica_batch.text.settings import TextSettings
from punica_batch.types import AdapterSpec


@dataclass(frozen=True)
class OpenedJob:
    """``model_folder`` and ``tokenizer_folder`` are local. ``max_model_len``: tokens of prompt and answer together."""

    config: JobConfig
    source: Source
    registry: Registry
    model_folder: Path
    tokenizer_folder: Path
    model: ModelConfig
    max_model_len: int

    def text_settings(self, specs: Mapping[str, AdapterSpec], adapter_errors: Mapping[str, str]) -> TextSettings:
        """What the text process needs. ``specs``: the good adapters that rows name; ``adapter_errors``: the others,
        with the ``code: sentence`` that their rows get."""
        return TextSettings.from_config(
            self.config,
            model_folder=self.model_folder,
            tokenizer_folder=self.tokenizer_folder,
            max_model_len=self.max_model_len,
            adapters=specs,
            adapter_errors=adapter_errors,
            is_messages=None if self.source.kind == "openai" else self.source.is_messages,
            may_grow=self.max_model_len < self.model.max_position_embeddings,
        )


def open_job(config: JobConfig) -> OpenedJob:
    """Opens everything and refuses what is wrong before any work.

    Raises ``UsageError`` (no model named), ``InputError``, ``ModelError``, ``AdapterError``, ``ConfigError`` (a wrong
    registry file) and ``StoreAway``.
    """
    if config.model is None:
        raise UsageError("no model is named: give --model, PUNICA_BATCH_MODEL, or `model` in punica-batch.toml")
    registry = Registry.open(config)
    source = Source.open(config, prompt_templates(registry))
    output_schema(source.schema, config, lists=source.lists)  # an output column that would hide one of the input's
    model_folder = resolve_model(config.model, config.revision)
    model = ModelConfig.from_folder(model_folder)
    named = config.tokenizer
    tokenizer_folder = model_folder if named is None else resolve_model(named, kind="tokenizer")
    return OpenedJob(
        config=config,
        source=source,
        registry=registry,
        model_folder=model_folder,
        tokenizer_folder=tokenizer_folder,
        model=model,
        max_model_len=context_length(config, model),
    )


def shard_rows(config: JobConfig, num_rows: int) -> tuple[int, int]:
    """The rows [start, stop) of ``--shard I/N``: whole parts, as evenly as they divide. All rows without it."""
    index, count = config.shard_of
    num_parts = -(-num_rows // config.rows_per_shard)
    first, last = index * num_parts // count, (index + 1) * num_parts // count
    return min(first * config.rows_per_shard, num_rows), min(last * config.rows_per_shard, num_rows)


def context_length(config: JobConfig, model: ModelConfig) -> int:
    """``--max-model-len``, else the model's own. Raises ``UsageError`` when it is beyond the model's."""
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise UsageError(f"--max-model-len {config.max_model_len} is beyond the model's own {longest}: lower it")
    return config.max_model_len


def prompt_templates(registry: Registry) -> list[str]:
    """The distinct prompt templates of the registry's entries, sorted: the columns in them must be read."""
    templates = (registry.get(name).prompt_template for name in registry.names())
    return sorted({template for template in templates if template is not None})
