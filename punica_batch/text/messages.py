"""A row's ``messages``: checked, and made into the plain dictionaries that templates expect."""

from __future__ import annotations

import json
from typing import Any

from punica_batch.errors import RowError
from punica_batch.text.sandbox import MAX_CHARS


def parse_messages(value: Any, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """``value``, a list of role/content objects or the JSON text of one, without keys whose value is null.

    Content is a string or a list of text parts (``{"type": "text", "text": ...}``), which are joined by newlines; it
    may be missing only beside ``tool_calls``. ``system_prompt`` goes first unless there is a system message. Raises
    ``RowError``: ``bad_messages``, or ``prompt_too_long`` above 4 Mi characters.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError("bad_messages", "messages is a string that is not JSON") from None
    if not isinstance(value, list) or not value:
        raise RowError("bad_messages", "messages must be a list with at least one message")
    messages = [_parse_one(number, message) for number, message in enumerate(value)]
    if sum(len(message.get("content", "")) for message in messages) > MAX_CHARS:
        raise RowError("prompt_too_long", f"the messages hold more than {MAX_CHARS} characters; shorten them")
    if system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _parse_one(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError("bad_messages", f"message {number} is not an object with role and content")
    out = {key: item for key, item in message.items() if item is not None}
    role, content = out.get("role"), out.get("content")
    if not isinstance(role, str) or not role:
        raise RowError("bad_messages", f"message {number} has no role; give it one (system, user, assistant, ...)")
    if isinstance(content, list):
        out["content"] = "\n".join(_part_text(number, part) for part in content)
    elif not isinstance(content, str) and (content is not None or not out.get("tool_calls")):
        raise RowError("bad_messages", f"message {number} has no content; give it a string")
    return out


def _part_text(number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise RowError("bad_messages", f"message {number} has a part that is not text; only text parts are read")
    return text
