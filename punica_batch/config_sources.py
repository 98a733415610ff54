"""Where a job's values come from: flag, else environment, else job file, else default.

The job file is ``--config``, else ``punica-batch.toml`` beside the first input, else in the current folder. Its keys
are the flags' names (with ``-`` or ``_``); relative paths in it are relative to the file. Tables (``lora_modules``,
``storage_options``) are merged key by key, everything else is replaced as a whole.
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError as PydanticError

from punica_batch.config import FieldError, JobConfig, JobFields, nearest
from punica_batch.errors import ConfigError, UsageError
from punica_batch.urls import redact

JOB_FILE = "punica-batch.toml"
ENVIRONMENT = {"PUNICA_BATCH_MODEL": "model", "PUNICA_BATCH_ADAPTERS": "adapters"}

_PATHS = ("output", "adapters", "work_dir")
_PATHS_OR_NAMES = ("model", "tokenizer", "chat_template")  # a path if it is there or says so (./x), else a hub name
_FLAG_ONLY = {"overwrite": "a job file that starts over each time would make resuming impossible"}


def load_config(
    inputs: Sequence[str],
    flags: Mapping[str, Any],
    *,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
    search: bool = True,
) -> JobConfig:
    """The job that a command line asks for.

    ``flags`` holds the given flags only, by ``JobConfig`` field name; ``search`` False reads no job file but the named
    one. Raises ``ConfigError`` for a job file (unknown
    key, wrong type, not readable) and ``UsageError`` for a flag or environment variable out of range.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if inputs:
        given["inputs"] = tuple(inputs)
    environment = _from_environment(os.environ if environ is None else environ)
    path = find_job_file(inputs, config) if search or config is not None else None
    merged = read_job_file(path) if path is not None else {}
    for source in (environment, given):
        for name, value in source.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    try:
        return JobConfig.model_validate(merged)
    except FieldError as error:
        variable = next((v for v, f in ENVIRONMENT.items() if f == error.field and f not in given), None)
        raise UsageError(f"{variable or flag_name(error.field)} {error.problem}") from None


def find_job_file(inputs: Sequence[str], config: str | None = None) -> Path | None:
    """The job file that applies, if there is one. Raises ``ConfigError`` when the named one is not there."""
    if config is not None:
        path = Path(config).expanduser()
        if not path.is_file():
            raise ConfigError(f"{redact(config)}: no such job file; check --config")
        return path
    folders = [_beside(inputs[0])] if inputs else []
    for folder in (*folders, Path()):
        if folder is not None and (folder / JOB_FILE).is_file():
            return folder / JOB_FILE
    return None


def read_job_file(path: Path) -> dict[str, Any]:
    """The values of a job file by field name, checked one by one, with its relative paths resolved.

    Raises ``ConfigError`` naming the file, the key and the nearest valid one.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        field = key.replace("-", "_")
        if field in _FLAG_ONLY:
            raise ConfigError(f"{path}: {key!r} is for the command line only: {_FLAG_ONLY[field]}")
        if field not in JobConfig.model_fields and isinstance(value, dict):
            raise ConfigError(f"{path}: keys are top-level, there is no table [{key}]")
        if field not in JobConfig.model_fields:
            raise ConfigError(f"{path}: unknown key {key!r}; the nearest valid one is {nearest(field)!r}")
        if field in values:
            raise ConfigError(f"{path}: {key!r} is given twice, with - and with _")
        values[field] = _natural(field, value)
    try:
        checked = JobFields.model_validate(values, strict=True)
    except PydanticError as error:
        wrong = FieldError.of(error)
        raise ConfigError(f"{path}: {wrong.field!r} {wrong.problem}") from None
    return _resolve({name: getattr(checked, name) for name in values}, path.parent)


def parse_pairs(flag: str, pairs: Iterable[str]) -> dict[str, str]:
    """``["NAME=VALUE", ...]`` of a repeated flag as a dict. Raises ``UsageError``; never repeats a value."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            form = "NAME=PATH" if flag == "--lora-modules" else "NAME=VALUE"
            raise UsageError(f"{flag} must be {form}, once for each")
        if name in parsed:
            raise UsageError(f"{flag} names {name!r} twice")
        parsed[name] = value
    return parsed


def flag_name(field: str) -> str:
    """``max_tokens`` → ``--max-tokens``; the two repeated flags are singular where the field is plural."""
    if field == "inputs":
        return "INPUT"
    return "--storage-option" if field == "storage_options" else "--" + field.replace("_", "-")


def is_url(path: str) -> bool:
    return "://" in path


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {field: environ[name] for name, field in ENVIRONMENT.items() if environ.get(name)}


def _beside(source: str) -> Path | None:
    """The folder in which an input lies: of a pattern, the folder of its first wildcard. None for a remote input."""
    source = source.removeprefix("file://")
    if is_url(source):
        return None
    path = Path(source)
    for parent in reversed((path, *path.parents)):
        if glob.has_magic(parent.name):
            return parent.parent
    return path.parent


def _natural(field: str, value: Any) -> Any:
    """TOML's own way to write a value: lists for tuples, and plain numbers where a flag takes text (``gpus = 8``)."""
    if isinstance(value, list):
        return tuple(value)
    if field in ("gpus", "max_errors") and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _resolve(values: dict[str, Any], base: Path) -> dict[str, Any]:
    for name, value in values.items():
        if value is None:
            continue
        if name == "inputs":
            values[name] = tuple(_relative_to(base, item) for item in value)
        elif name == "lora_modules":
            values[name] = {key: _relative_to(base, item) for key, item in value.items()}
        elif name in _PATHS:
            values[name] = _relative_to(base, value)
        elif name in _PATHS_OR_NAMES:
            resolved = _relative_to(base, value)
            says_path = value.startswith(("./", "../", "~"))
            values[name] = resolved if says_path or _exists(resolved) else value
    return values


def _relative_to(base: Path, value: str) -> str:
    if is_url(value):
        return value
    slash = "/" if value.endswith("/") else ""  # "out/" asks for a folder, "out" for a file
    return os.path.normpath(base / Path(value).expanduser()) + slash


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except (OSError, ValueError):  # a whole template in place of its path
        return False
