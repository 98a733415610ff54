"""A TOML registry: ``[adapters.NAME] path=… labels=[…] prompt_template=… …``, checked key by key."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from punica_batch.adapters.store import Folder, is_remote, join
from punica_batch.errors import AdapterError, ConfigError
from punica_batch.types import AdapterSpec
from punica_batch.urls import redact

_MAX_BYTES = 256 << 20


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)


def _are_labels(value: Any) -> bool:
    return _are_texts(value) and len(set(value)) == len(value)


_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "path": (_is_path, "a path or URL"),
    "labels": (_are_labels, "a list of different, non-empty texts"),
    "prompt_template": (_is_text, "a text"),
    "system_prompt": (_is_text, "a text"),
    "label_template": (_is_text, "a text"),
    "chat_template": (_is_text, "a text"),
    "max_tokens": (_is_count, "a whole number of at least 1"),
    "stop": (_are_texts, "a list of non-empty texts"),
}


def read_registry_file(url: str, storage_options: Mapping[str, Any]) -> dict[str, AdapterSpec]:
    """Specs by name; relative paths are taken from the file's folder.

    Raises ``ConfigError`` naming file, key and nearest valid key; ``AdapterError`` (no such file); ``StoreAway``.
    """
    parent, _, name = url.rpartition("/")
    folder = Folder(parent or "/", storage_options)
    stamp = folder.stamp(name)
    if stamp is None:
        raise AdapterError(f"{redact(url)}: there is no such registry file")
    if stamp.size > _MAX_BYTES:
        raise ConfigError(f"{redact(url)} has {stamp.size} bytes; at most {_MAX_BYTES} are read")
    try:
        raw = tomllib.loads(folder.read(name, 0, _MAX_BYTES).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        where = f": {exc}" if isinstance(exc, tomllib.TOMLDecodeError) else ""
        raise ConfigError(f"{redact(url)} is not valid TOML{where}") from exc
    _check_keys(url, "", raw, ("adapters",))
    entries = raw.get("adapters", {})
    if not isinstance(entries, dict):
        raise ConfigError(f"{redact(url)}: adapters must be tables, [adapters.NAME]")
    return {key: _spec(url, folder.url, key, entry) for key, entry in entries.items()}


def _spec(url: str, parent: str, name: str, entry: Any) -> AdapterSpec:
    where = f"adapters.{name!r}"
    if not name:
        raise ConfigError(f"{redact(url)}: an adapter's name must not be empty: that is the base model")
    if not isinstance(entry, dict):
        raise ConfigError(f"{redact(url)}: {where} must be a table with a path")
    _check_keys(url, where, entry, _KEYS)
    for key, value in entry.items():
        is_good, wanted = _KEYS[key]
        if not is_good(value):
            raise ConfigError(f"{redact(url)}: {where}: {key} must be {wanted}")
    if "path" not in entry:
        raise ConfigError(f"{redact(url)}: {where} has no path")
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
    values["path"] = _resolve(parent, entry["path"])
    template = entry.get("chat_template")
    if template and not any(char in template for char in "{}\n"):  # a file's name, not a template
        values["chat_template"] = _resolve(parent, template)
    return AdapterSpec(name=name, **values)


def _resolve(parent: str, path: str) -> str:
    if "://" in path:
        return path
    path = os.path.expanduser(path)
    if path.startswith("/"):
        return path
    joined = join(parent, path)
    return joined if is_remote(parent) else os.path.normpath(joined)


def _check_keys(url: str, where: str, table: Mapping[str, Any], valid: Iterable[str]) -> None:
    names = list(valid)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            inside = f"{where}: " if where else ""
            raise ConfigError(f"{redact(url)}: {inside}unknown key {key!r}; the nearest valid one is {near[0]!r}")
