"""Which template, system prompt and defaults a row gets: its adapter's where it has them, else the job's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from punica_batch.errors import InputError, PunicaError, RowError, UnknownAdapters, UsageError
from punica_batch.text.chat import ChatTemplate, read_template
from punica_batch.text.options import adapter_defaults
from punica_batch.text.prompt_template import PromptTemplate
from punica_batch.text.settings import TextSettings
from punica_batch.types import AdapterSpec, SamplingParams


@dataclass(frozen=True, slots=True)
class Rule:
    """How one adapter's rows (or the base model's) become text.

    ``chat`` is None where there is no chat template. ``chat_prompts``: a prompt becomes one user message.
    """

    sampling: SamplingParams
    prompt_template: PromptTemplate | None
    chat: ChatTemplate | None
    chat_prompts: bool
    system_prompt: str | None


class Templates:
    """The rules by ``lora_id``, each compiled at its first row. Raises ``InputError`` for a bad template of the job."""

    def __init__(self, settings: TextSettings, special_tokens: Mapping[str, str]) -> None:
        self._settings = settings
        self._special_tokens = special_tokens
        self._now = settings.now or datetime.now()
        self._compiled: dict[str, ChatTemplate] = {}
        self._rules: dict[str, Rule | RowError] = {}
        self._unknown = UnknownAdapters()
        self._base = self._make(None)

    def rule(self, lora_id: str | None) -> Rule:
        """Raises ``RowError``: ``unknown_adapter``, the adapter's own error, or ``template_failed``."""
        if lora_id is None:
            return self._base
        rule = self._rules.get(lora_id)
        if rule is None:
            rule = self._find(lora_id)
            if lora_id in self._settings.adapters or lora_id in self._settings.adapter_errors:
                self._rules[lora_id] = rule
        if isinstance(rule, RowError):
            raise rule.with_traceback(None)
        return rule

    def _find(self, lora_id: str) -> Rule | RowError:
        refused = self._settings.adapter_errors.get(lora_id)
        if refused is not None:
            code, _, sentence = refused.partition(": ")
            return RowError(code, sentence)
        spec = self._settings.adapters.get(lora_id)
        if spec is None:
            return self._unknown.error(lora_id, self._settings.adapters.keys() | self._settings.adapter_errors.keys())
        try:
            return self._make(spec)
        except UsageError as error:
            return RowError("bad_option", f"adapter {lora_id!r}: {error}")
        except PunicaError as error:
            return RowError("template_failed", str(error))

    def _make(self, spec: AdapterSpec | None) -> Rule:
        settings = self._settings
        where = f"adapter {spec.name!r}" if spec else ""
        prompt, chat = settings.prompt_template, settings.chat_template
        prompt_where, chat_where = "--prompt-template", "chat template"
        own_chat = False
        if spec and spec.prompt_template is not None:
            prompt, prompt_where = spec.prompt_template, f"{where}: prompt_template"
        if spec and spec.chat_template is not None:
            chat_where, own_chat = f"{where}: chat_template", True
            chat = read_template(spec.chat_template, chat_where)
        system_prompt = spec.system_prompt if spec else None
        chat_prompts = settings.apply_chat_template
        if chat_prompts is None:  # what an adapter says of chats is meant for its rows
            chat_prompts = own_chat or system_prompt is not None
        return Rule(
            sampling=adapter_defaults(settings.sampling, spec),
            prompt_template=None if prompt is None else PromptTemplate(prompt, prompt_where),
            chat=None if chat is None else self._compile(chat, chat_where),
            chat_prompts=chat_prompts,
            system_prompt=system_prompt,
        )

    def _compile(self, source: str, where: str) -> ChatTemplate:
        """One compiled template for all adapters with the same source."""
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self._special_tokens, now=self._now, where=where)
        return self._compiled[source]


def check_text(settings: TextSettings, columns: Collection[str], lora_ids: Collection[str | None]) -> None:
    """What can be known before any work: raise ``InputError`` for a template that the rows cannot use.

    ``columns`` are the input's, ``lora_ids`` those that its rows name (None: the base model). Looks at the job's
    template and those of the adapters named: unknown columns (with the nearest name), templates that do not parse,
    a chat without a chat template.
    """
    templates = Templates(settings, {})
    for lora_id in lora_ids:
        if lora_id is not None and (lora_id in settings.adapter_errors or lora_id not in settings.adapters):
            continue
        try:
            rule = templates.rule(lora_id)
        except RowError as error:
            raise InputError(error.sentence) from error
        # Prompt templates make prompts; messages are rendered without them.
        if rule.prompt_template is not None and not settings.is_messages:
            rule.prompt_template.sources(columns, settings.prompt_column)
        if rule.chat is None and (rule.chat_prompts or settings.is_messages):
            who = "the model" if lora_id is None else f"adapter {lora_id!r}"
            raise InputError(f"{who} has no chat template; give one with --chat-template")
