"""``--prompt-template``: a prompt made of columns, ``Title: {title}\\nText: {text}``.

``{name}`` is the value of the column of exactly that name; where there is no column ``prompt``, ``{prompt}`` is the
job's prompt column. ``{{`` and ``}}`` are braces. Nothing else has a meaning: no attributes, indices, conversions or
format specs, so that a template can read columns and do nothing else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

from punica_batch.errors import InputError

PROMPT = "prompt"
_NEAR = 0.7  # of difflib's ratio: a slip of the finger, not just some letters in common
_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class PromptTemplate:
    """A parsed template. ``columns`` are the names in it, each once. Raises ``InputError`` naming ``where``."""

    def __init__(self, source: str, where: str = "--prompt-template") -> None:
        self._where = where
        self._literals = [""]
        self._fields: list[int] = []
        columns: dict[str, int] = {}
        end = 0
        for token in _TOKEN.finditer(source):
            self._literals[-1] += source[end : token.start()]
            end = token.end()
            if token[0] in ("{{", "}}"):
                self._literals[-1] += token[0][0]
            elif not token[1]:
                raise InputError(
                    f"{where}: {token[0]!r} at character {token.start()} names no column; "
                    "a brace is written {{ or }}"
                )
            else:
                self._fields.append(columns.setdefault(token[1], len(columns)))
                self._literals.append("")
        self._literals[-1] += source[end:]
        self.columns = tuple(columns)

    def sources(self, names: Collection[str], prompt_column: str) -> tuple[str, ...]:
        """Of each of ``columns`` the input column that it stands for: ``{prompt}`` is the job's ``prompt_column`` where
        the input has no column of that very name, so that one template serves inputs with other names.

        Raises ``InputError`` unless all are among ``names``; it gives the nearest one there is."""
        return tuple(self._source(column, names, prompt_column) for column in self.columns)

    def _source(self, column: str, names: Collection[str], prompt_column: str) -> str:
        if column in names:
            return column
        if column == PROMPT and prompt_column in names:
            return prompt_column
        near = difflib.get_close_matches(column, names, n=1, cutoff=_NEAR)
        hint = f"did you mean {{{near[0]}}}?" if near else f"there are {', '.join(sorted(names))}"
        raise InputError(f"{self._where}: the input has no column {column!r}; {hint}")

    def render(self, values: Sequence[str]) -> str:
        """The prompt; ``values`` in the order of ``columns``."""
        parts = [self._literals[0]]
        for field, literal in zip(self._fields, self._literals[1:], strict=True):
            parts += (values[field], literal)
        return "".join(parts)
