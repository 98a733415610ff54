"""``TextSettings``: all that turning rows into requests depends on, as plain data for another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from punica_batch.config import JobConfig
from punica_batch.text.chat import find_chat_template
from punica_batch.types import AdapterSpec, SamplingParams


@dataclass(frozen=True)
class TextSettings:
    """Picklable. ``chat_template`` is the template's source, no file's name.

    ``adapters`` are the registry's entries by ``lora_id``; ``adapter_errors`` those that were refused, with the
    ``code: sentence`` that their rows get. ``now`` is the date that templates see (None: when they are compiled).
    ``is_messages``: whether rows are read from the messages column or from the prompt column; a column of the other
    name is then nothing special. None: whichever of the two a row has. ``may_grow``: whether ``max_model_len`` could be
    set higher.
    """

    model_folder: str
    tokenizer_folder: str
    max_model_len: int
    sampling: SamplingParams
    overlong: Literal["error", "truncate-left"] = "error"
    chat_template: str | None = None
    apply_chat_template: bool | None = None
    prompt_template: str | None = None
    prompt_column: str = "prompt"
    messages_column: str = "messages"
    is_messages: bool | None = None
    lora_column: str = "lora_id"
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict)
    adapter_errors: Mapping[str, str] = field(default_factory=dict)
    now: datetime | None = None
    may_grow: bool = False

    @classmethod
    def from_config(
        cls,
        config: JobConfig,
        *,
        model_folder: str | Path,
        max_model_len: int,
        tokenizer_folder: str | Path | None = None,
        adapters: Mapping[str, AdapterSpec] | None = None,
        adapter_errors: Mapping[str, str] | None = None,
        is_messages: bool | None = None,
        now: datetime | None = None,
        may_grow: bool = False,
    ) -> TextSettings:
        """Folders are local. ``now`` is this moment unless given, so that one job's processes see one date.

        Raises ``InputError`` or ``ModelError`` when the chat template cannot be found or read.
        """
        tokenizer_folder = model_folder if tokenizer_folder is None else tokenizer_folder
        return cls(
            model_folder=str(model_folder),
            tokenizer_folder=str(tokenizer_folder),
            max_model_len=max_model_len,
            sampling=config.sampling(),
            overlong=config.overlong,
            chat_template=find_chat_template(tokenizer_folder, config.chat_template),
            apply_chat_template=config.apply_chat_template,
            prompt_template=config.prompt_template,
            prompt_column=config.prompt_column,
            messages_column=config.messages_column,
            is_messages=is_messages,
            lora_column=config.lora_column,
            adapters=dict(adapters or {}),
            adapter_errors=dict(adapter_errors or {}),
            now=now or datetime.now(),
            may_grow=may_grow,
        )
