"""Rows through a ``Preparer`` and what comes out, for tests of text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from punica_batch.config import JobConfig
from punica_batch.text.prepare import Prepared, Preparer
from punica_batch.text.settings import TextSettings
from punica_batch.types import AdapterSpec


def make(folder: Path, **changes: Any) -> Preparer:
    base = TextSettings.from_config(JobConfig(), model_folder=folder, max_model_len=200)
    specs = {"a": AdapterSpec("a", "x"), "b": AdapterSpec("b", "x", max_tokens=9, stop=("END",))}
    return Preparer(replace(base, **({"adapters": specs} | changes)))


def run(preparer: Preparer, first_row: int = 0, **columns: Any) -> Prepared:
    arrays = {n: v if isinstance(v, pa.Array) else pa.array(v) for n, v in columns.items()}
    return preparer.prepare(pa.RecordBatch.from_pydict(arrays), first_row)


def codes(prepared: Prepared) -> dict[int, str]:
    return {result.row: str(result.error).partition(":")[0] for result in prepared.errors}


def texts(preparer: Preparer, prepared: Prepared) -> list[str]:
    return [preparer.tokenizer.decode(request.prompt_token_ids) for request in prepared.requests]
