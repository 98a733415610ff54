"""Rows to ``Request``s: read, template, tokenize, check. Runs in the text process; each row comes out exactly once.

Error codes of this room, the part before ``:`` in the ``error`` column:

==================  ==================================================================================================
``input_error``     the reader could not make a row of it (its own code may stand here instead)
``null_prompt``     no prompt: its column, or one that the prompt template names, is null
``empty_prompt``    the prompt has no text, also where the tokenizer would add a BOS
``invalid_utf8``    text that is not UTF-8
``prompt_too_long`` prompt tokens + 1 > max_model_len (with ``--overlong error``), or a cell above 16 MiB
``unknown_adapter`` ``lora_id`` is not in the registry
``bad_option``      a per-row option is of a wrong type, NaN or out of range
``bad_messages``    ``messages`` is no list of role/content, or stands beside a prompt
``template_failed`` the chat or prompt template cannot be applied, or raises
``template_timeout``  the chat template ran too long
==================  ==================================================================================================

An adapter that was refused gives its rows the code it was refused with. Of several errors a row has the first of:
the reader's, adapter, options, prompt.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from punica_batch.errors import RowError
from punica_batch.text.columns import ERROR_COLUMN, read_text
from punica_batch.text.options import RowOptions
from punica_batch.text.render import RowText, RowTexts
from punica_batch.text.settings import TextSettings
from punica_batch.text.templates import Templates
from punica_batch.text.tokenizer import Tokenizer
from punica_batch.types import Request, RowResult, SamplingParams


@dataclass(frozen=True)
class Prepared:
    """Each row of a batch in exactly one of the two, in row order."""

    requests: list[Request]
    errors: list[RowResult]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row whose text is ready. ``index`` is its place in the batch."""

    index: int
    lora_id: str | None
    sampling: SamplingParams
    text: RowText


class Preparer:
    """Holds the tokenizer and the compiled templates; one for a process. Raises ``ModelError``, ``InputError``."""

    def __init__(self, settings: TextSettings) -> None:
        self._settings = settings
        self.tokenizer = Tokenizer.load(settings.tokenizer_folder, settings.model_folder)
        self._templates = Templates(settings, self.tokenizer.special_tokens)
        # No tokenizer makes fewer tokens of a text; 4 allows for normalizers that shorten it.
        self._hopeless_chars = 4 * self.tokenizer.max_token_chars * settings.max_model_len

    def reading(self, is_messages: bool | None) -> Preparer:
        """One for rows of this kind (see ``TextSettings``), with the same tokenizer and templates."""
        other = copy(self)
        other._settings = replace(self._settings, is_messages=is_messages)
        return other

    def prepare(self, batch: pa.RecordBatch, first_row: int) -> Prepared:
        """The batch's rows, numbered from ``first_row``."""
        errors: dict[int, tuple[RowError, int | None]] = {}
        rows = self._read(batch, errors)
        requests = []
        for row, ids in self._encode(rows, errors):
            try:
                requests.append(self._request(first_row, row, ids))
            except RowError as error:
                errors[row.index] = error, len(ids)
        requests.sort(key=lambda request: request.row)
        failed = [RowResult.failed(first_row + i, error, tokens) for i, (error, tokens) in sorted(errors.items())]
        assert len(requests) + len(failed) == batch.num_rows
        return Prepared(requests, failed)

    def _read(self, batch: pa.RecordBatch, errors: dict[int, tuple[RowError, int | None]]) -> list[_Row]:
        """The rows that have a text to tokenize; the others into ``errors``."""
        names = batch.schema.names
        settings = self._settings
        count = batch.num_rows
        ready = read_text(batch.column(ERROR_COLUMN), ERROR_COLUMN) if ERROR_COLUMN in names else [None] * count
        lora_ids = (
            read_text(batch.column(settings.lora_column), settings.lora_column)
            if settings.lora_column in names
            else [None] * count
        )
        options = RowOptions(batch)
        texts = RowTexts(batch, settings)
        rows = []
        for index, (said, lora_id) in enumerate(zip(ready, lora_ids, strict=True)):
            try:
                if said is not None:
                    raise _ready_error(said)
                if isinstance(lora_id, RowError):
                    raise lora_id
                rule = self._templates.rule(lora_id or None)
                sampling = options.sampling(index, rule.sampling)
                rows.append(_Row(index, lora_id or None, sampling, texts.render(index, rule)))
            except RowError as error:
                errors[index] = error, None
        return rows

    def _encode(
        self, rows: list[_Row], errors: dict[int, tuple[RowError, int | None]]
    ) -> list[tuple[_Row, NDArray[np.int32]]]:
        """Token ids of all rows, those with and without a chat template in one call each."""
        out: list[tuple[_Row, NDArray[np.int32]]] = []
        for templated in (False, True):
            group = []
            for row in rows:
                if row.text.templated == templated:
                    error = self._check_text(row.text.text)
                    if error is None:
                        group.append(row)
                    else:
                        errors[row.index] = error, None
            ids = self.tokenizer.encode_batch([row.text.text for row in group], templated=templated)
            out += zip(group, ids, strict=True)
        return out

    def _check_text(self, text: str) -> RowError | None:
        if not text:
            return RowError("empty_prompt", "the prompt is empty; give it text")
        if len(text) > self._hopeless_chars and self._settings.overlong == "error":
            limit = self._settings.max_model_len
            return self._too_long(f"the prompt's {len(text)} characters cannot fit max_model_len {limit}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                return RowError("invalid_utf8", "the prompt holds a lone surrogate")
        return None

    def _request(self, first_row: int, row: _Row, ids: NDArray[np.int32]) -> Request:
        sampling, limit = row.sampling, self._settings.max_model_len
        if not len(ids):
            raise RowError("empty_prompt", "the prompt has no tokens; give it text")
        if len(ids) + 1 > limit:
            if self._settings.overlong == "error":
                raise self._too_long(f"{len(ids)} prompt tokens and one more do not fit max_model_len {limit}")
            ids = self._truncate_left(ids, sampling.max_tokens)
        if len(ids) + sampling.max_tokens > limit:
            sampling = replace(sampling, max_tokens=limit - len(ids))
        return Request(first_row + row.index, ids, row.lora_id, sampling)

    def _too_long(self, what: str) -> RowError:
        grow = ", raise --max-model-len" if self._settings.may_grow else ""
        return RowError("prompt_too_long", f"{what}; shorten the prompt{grow} or use --overlong truncate-left")

    def _truncate_left(self, ids: NDArray[np.int32], max_tokens: int) -> NDArray[np.int32]:
        """The last tokens, a leading BOS kept, such that ``max_tokens`` more fit (in at most half of the context).

        As lm-eval does for generation: a prompt cut to the whole context would leave room for one token.
        """
        limit = self._settings.max_model_len
        keep = limit - min(max_tokens, max(1, limit // 2))
        if keep < 1:
            raise RowError("prompt_too_long", f"max_model_len {limit} has no room for a prompt")
        if ids[0] == self.tokenizer.bos_token_id and keep > 1:
            return np.concatenate((ids[:1], ids[len(ids) - keep + 1 :]))
        return ids[len(ids) - keep :].copy()


def _ready_error(said: str | RowError) -> RowError:
    if isinstance(said, RowError):
        return said
    code, colon, sentence = said.partition(": ")
    return RowError(code, sentence) if colon else RowError("input_error", said)


def render_preview(preparer: Preparer, batch: pa.RecordBatch, index: int = 0, count: int = 16) -> list[tuple[int, str]]:
    """The first ``count`` tokens of row ``index`` as the model will see them: (id, the vocabulary's string).

    Raises ``RowError`` when the row is in error.
    """
    prepared = preparer.prepare(batch.slice(index, 1), 0)
    if prepared.errors:
        assert prepared.errors[0].error is not None
        raise _ready_error(prepared.errors[0].error)
    ids = prepared.requests[0].prompt_token_ids[:count].tolist()
    return [(token_id, preparer.tokenizer.token(token_id)) for token_id in ids]
