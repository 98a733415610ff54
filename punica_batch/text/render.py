"""One row's text: its prompt or messages through the templates that its rule names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from punica_batch.errors import InputError, RowError
from punica_batch.text.chat import ChatTemplate
from punica_batch.text.columns import ERROR_COLUMN, read_text, read_values
from punica_batch.text.messages import parse_messages
from punica_batch.text.prompt_template import PromptTemplate
from punica_batch.text.settings import TextSettings
from punica_batch.text.templates import Rule

_MAX_TIMEOUTS = 3  # of one template in one batch; its rows after that are not tried


@dataclass(frozen=True, slots=True)
class RowText:
    """``templated``: a chat template made it, which writes the model's special tokens itself."""

    text: str
    templated: bool


class RowTexts:
    """The texts of one batch's rows; columns are converted when a row first needs them."""

    def __init__(self, batch: pa.RecordBatch, settings: TextSettings) -> None:
        self._batch = batch
        self._names = frozenset(batch.schema.names)
        self._columns: dict[str, list[str | RowError | None]] = {}
        self._is_messages = settings.is_messages
        self._messages_column = settings.messages_column
        self._messages = None if self._is_messages is False else self._read_messages(settings.messages_column)
        self._prompt_column = settings.prompt_column
        self._timeouts: Counter[ChatTemplate] = Counter()

    def _read_messages(self, name: str) -> list[Any] | None:
        return read_values(self._batch.column(name), name) if name in self._names else None

    def render(self, index: int, rule: Rule) -> RowText:
        """Raises ``RowError``."""
        messages = None if self._messages is None else self._messages[index]
        if isinstance(messages, RowError):
            raise messages
        if messages is not None:
            if self._is_messages is None and self._has(self._prompt_column, index):
                raise RowError("bad_messages", "the row has a prompt and messages; give it one of them")
            return self._chat(messages, rule)
        if self._is_messages or (self._messages is not None and self._prompt_column not in self._names):
            raise RowError("null_prompt", f"column {self._messages_column!r} is null")
        prompt = self._prompt(index, rule.prompt_template)
        if rule.chat_prompts:
            return self._chat([{"role": "user", "content": prompt}], rule)
        return RowText(prompt, templated=False)

    def _has(self, name: str, index: int) -> bool:
        return name in self._names and self._column(name)[index] is not None

    def _chat(self, messages: Any, rule: Rule) -> RowText:
        if rule.chat is None:
            raise RowError("template_failed", "the model has no chat template; give one with --chat-template")
        parsed = parse_messages(messages, rule.system_prompt)
        if self._timeouts[rule.chat] >= _MAX_TIMEOUTS:
            raise RowError("template_timeout", "the chat template ran too long for rows near this one; mend it")
        try:
            return RowText(rule.chat.render(parsed), templated=True)
        except RowError as error:
            self._timeouts[rule.chat] += error.code == "template_timeout"
            raise

    def _prompt(self, index: int, template: PromptTemplate | None) -> str:
        if template is None:
            return self._cell(self._prompt_column, index)
        try:
            columns = template.sources(self._names - {ERROR_COLUMN}, self._prompt_column)
        except InputError as error:
            raise RowError("template_failed", str(error)) from None
        return template.render([self._cell(name, index) for name in columns])

    def _cell(self, name: str, index: int) -> str:
        value = self._column(name)[index] if name in self._names else None
        if value is None:
            raise RowError("null_prompt", f"column {name!r} is null")
        if isinstance(value, RowError):
            raise value
        return value

    def _column(self, name: str) -> list[str | RowError | None]:
        if name not in self._columns:
            self._columns[name] = read_text(self._batch.column(name), name)
        return self._columns[name]
