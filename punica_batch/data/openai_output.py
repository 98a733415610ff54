"""Results as the output lines of an OpenAI batch: ``id``, ``custom_id``, ``response`` and ``error``.

A row that ran answers with status 200 and the body of a chat completion or a text completion, one choice a sample. A
row in error has a null response and ``error`` {code, message}. Tokens of log-probabilities are shown as
``token_id:N``, as vLLM does with ``return_tokens_as_token_ids``.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

REQUEST_COLUMNS = ("custom_id", "endpoint", "model")


def answer_lines(batch: pa.RecordBatch, first_row: int, created: int) -> bytes:
    """``batch`` holds REQUEST_COLUMNS and ``result_schema``'s columns as lists; one line a row, UTF-8."""
    lines = [
        json.dumps(_answer(values, row, created), ensure_ascii=False, separators=(",", ":"))
        for row, values in enumerate(batch.to_pylist(), first_row)
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _answer(values: dict[str, Any], row: int, created: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": f"batch_req_{row:012d}", "custom_id": values["custom_id"]}
    if values["error"] is not None:
        code, _, message = values["error"].partition(": ")
        return {**answer, "response": None, "error": {"code": code, "message": message}}
    response = {"status_code": 200, "request_id": f"req_{row:012d}", "body": _body(values, row, created)}
    return {**answer, "response": response, "error": None}


def _body(values: dict[str, Any], row: int, created: int) -> dict[str, Any]:
    chat = values["endpoint"] == "chat"
    prompt, completion = values["prompt_tokens"] or 0, sum(values["completion_tokens"])
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row:012d}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": values["model"] or "",
        "choices": [_choice(values, index, chat) for index in range(len(values["generation"]))],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }


def _choice(values: dict[str, Any], index: int, chat: bool) -> dict[str, Any]:
    text, reason = values["generation"][index], values["finish_reason"][index]
    logprobs = _logprobs(values, index, chat) if values.get("token_ids") is not None else None
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(values: dict[str, Any], index: int, chat: bool) -> dict[str, Any]:
    ids, chosen, top = (values[name][index] for name in ("token_ids", "token_logprobs", "top_logprobs"))
    if chat:
        return {"content": [_token(*one) for one in zip(ids, chosen, top, strict=True)]}
    return {
        "tokens": [_shown(token) for token in ids],
        "token_logprobs": chosen,
        "top_logprobs": [{_shown(pair["token_id"]): pair["logprob"] for pair in pairs} for pairs in top],
    }


def _token(token: int, logprob: float, top: list[dict[str, Any]]) -> dict[str, Any]:
    likeliest = [{"token": _shown(pair["token_id"]), "logprob": pair["logprob"], "bytes": None} for pair in top]
    return {"token": _shown(token), "logprob": logprob, "bytes": None, "top_logprobs": likeliest}


def _shown(token: int) -> str:
    return f"token_id:{token}"
