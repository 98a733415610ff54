"""One line of an OpenAI batch file as a row.

What a body may hold: ``model``, ``messages`` or ``prompt``, ``max_tokens`` or ``max_completion_tokens``,
``temperature``, ``top_p``, ``seed``, ``stop``, ``n``, ``logprobs``/``top_logprobs``, and of vLLM's additions ``top_k``
and ``min_p``. A key that would change the answer and is not honoured is an error of the row, never ignored.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from punica_batch.config import JobConfig
from punica_batch.data.columns import ERROR_COLUMN
from punica_batch.errors import RowError

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
# Keys that do not change the text, or do not at these values.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "stream_options",
})  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_NUMBERS = {
    "max_tokens": int, "max_completion_tokens": int, "top_k": int, "seed": int, "n": int,
    "temperature": float, "top_p": float, "min_p": float,
}  # fmt: skip
_HANDLED = frozenset({*_NUMBERS, "model", "messages", "prompt", "stop", "logprobs", "top_logprobs"})


def parse_line(line: bytes, config: JobConfig) -> dict[str, Any]:
    """The row's columns by name (see ``openai_input``); absent ones are null. Never raises for a line's content."""
    row: dict[str, Any] = {"line": line.decode("utf-8", "replace").strip("\r\n\ufeff")}
    try:
        _fill(row, line, config)
    except RowError as error:
        row[ERROR_COLUMN] = str(error)
    return row


def _fill(row: dict[str, Any], line: bytes, config: JobConfig) -> None:
    try:
        request = json.loads(line.decode("utf-8-sig"))
        json.dumps(request, ensure_ascii=False).encode()  # a lone surrogate is no text
    except UnicodeError as error:
        raise RowError("invalid_utf8", "the line is not valid UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise RowError("bad_json", "the line is not valid JSON.") from error
    if not isinstance(request, dict):
        raise _bad("the line is not a JSON object")
    custom_id, body = request.get("custom_id"), request.get("body")
    if not isinstance(custom_id, str):
        raise _bad("custom_id must be a string")
    row["custom_id"] = custom_id
    if not isinstance(body, dict):
        raise _bad("body must be a JSON object")
    url = request.get("url", "/v1/chat/completions" if "messages" in body else "/v1/completions")
    if not isinstance(url, str) or url not in ENDPOINTS or request.get("method", "POST") != "POST":
        raise RowError("unsupported_request", f"only POST to {' and '.join(ENDPOINTS)} can be run.")
    row["endpoint"] = ENDPOINTS[url]
    _model(row, body, config)
    _text(row, body, config)
    _options(row, body)
    _refuse_unknown(body, config)


def _model(row: dict[str, Any], body: dict[str, Any], config: JobConfig) -> None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _bad("model must be a string")
    row["model"] = model or None
    base = (None, "", config.model, PurePosixPath(config.model or "").name)
    row[config.lora_column] = None if model in base else model


def _text(row: dict[str, Any], body: dict[str, Any], config: JobConfig) -> None:
    if row["endpoint"] == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _bad("messages must be a list that is not empty")
        row[config.messages_column] = [_message(message) for message in messages]
        return
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise _bad("prompt must be one string")
    row[config.prompt_column] = prompt


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _bad("each of messages must have a role and a content")
    if message.get("tool_calls"):
        raise RowError("unsupported_option", "tool calls in messages cannot be run.")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise RowError("unsupported_option", "only text can be the content of a message.")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise _bad("each of messages must have text as its content")
    return {"role": message["role"], "content": content}


def _options(row: dict[str, Any], body: dict[str, Any]) -> None:
    for name, kind in _NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise _bad(f"{name} must be {'an integer' if kind is int else 'a number'}")
        if kind is int and not -(2**63) <= value < 2**63:
            raise _bad(f"{name} must fit 64 bits")
        row["max_tokens" if name == "max_completion_tokens" else name] = kind(value)
    stop = body.get("stop")
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None and not (isinstance(stop, list) and all(isinstance(one, str) for one in stop)):
        raise _bad("stop must be a string or a list of strings")
    row["stop"] = stop


def _refuse_unknown(body: dict[str, Any], config: JobConfig) -> None:
    wanted = wanted_logprobs(body)
    if wanted is not None and (config.logprobs is None or wanted > config.logprobs):
        raise RowError(
            "unsupported_option", f"the row asks for log-probabilities: run the job with --logprobs {wanted}."
        )
    for key, value in body.items():
        if key in _HANDLED or key in _IGNORED or value is None or value in _NEUTRAL.get(key, ()):
            continue
        raise RowError("unsupported_option", f"body key {key[:40]!r} is not supported at this value.")


def wanted_logprobs(body: dict[str, Any]) -> int | None:
    """How many log-probabilities a token the request asks for (0: the chosen one only), or None."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if logprobs is None or logprobs is False:
        return None
    count = (0 if top is None else top) if logprobs is True else logprobs
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 256:
        raise _bad("logprobs and top_logprobs must be a flag and a count")
    return count


def _bad(sentence: str) -> RowError:
    return RowError("bad_request", f"{sentence}.")
