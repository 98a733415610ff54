"""The registry: ``lora_id`` → where the adapter's files are, and the text settings that its rows share.

A folder of adapter folders or a TOML file, local or on any fsspec store, plus ``--lora-modules NAME=PATH``. Opening
reads no adapter, and lists a folder only when the first name is asked for. A ``lora_id`` is looked up among the names
that are there; it is never made into a path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from punica_batch.adapters.peft import CONFIG_NAME, WEIGHTS_NAME
from punica_batch.adapters.registry_file import read_registry_file
from punica_batch.adapters.store import Folder, connect, is_remote, join
from punica_batch.config import JobConfig
from punica_batch.errors import AdapterError, RowError, UnknownAdapters, shown_name
from punica_batch.types import AdapterSpec
from punica_batch.urls import redact

_MAX_NAME = 1024


class Registry:
    """Names and what they stand for. Plain data: can be sent to another process."""

    def __init__(
        self,
        specs: Mapping[str, AdapterSpec],
        folder: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._specs = dict(specs)
        self._folder = folder
        self._options = dict(storage_options or {})
        self._unknown_names = UnknownAdapters()
        self._listed: dict[str, bool] | None = None  # name → whether it is a symlink

    @classmethod
    def open(cls, config: JobConfig) -> Registry:
        """``config.adapters`` and ``config.lora_modules``; the latter replace the path of a name that has one.

        Raises ``ConfigError`` (a wrong TOML file), ``AdapterError`` (no such registry) and ``StoreAway``.
        """
        options = config.storage_options
        specs: dict[str, AdapterSpec] = {}
        folder = None
        if config.adapters is not None:
            url = config.adapters if "://" in config.adapters else os.path.abspath(os.path.expanduser(config.adapters))
            if url.endswith(".toml"):
                specs = read_registry_file(url, options)
            else:
                _check_folder(url, options)
                folder = url
        for name, path in config.lora_modules.items():
            specs[name] = replace(specs.get(name, AdapterSpec(name, path)), path=path)
        return cls(specs, folder, options)

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return self._options

    def names(self) -> list[str]:
        """All names, sorted. In a folder: its visible folders, those that a symlink leads out of it left out."""
        listed = self._list()
        inside = (name for name, is_link in listed.items() if not (is_link and self._leaves(name)))
        return sorted(self._specs.keys() | set(inside))

    def get(self, lora_id: str) -> AdapterSpec:
        """Raises ``RowError('unknown_adapter', ...)`` for anything that is not a name in the registry."""
        spec = self._specs.get(lora_id)
        if spec is not None:
            return spec
        if not _is_name(lora_id) or lora_id not in self._list():
            raise self._unknown(lora_id)
        if self._leaves(lora_id):
            raise RowError("unknown_adapter", f"adapter {shown_name(lora_id)} is a symlink that leaves the registry")
        assert self._folder is not None
        spec = self._specs[lora_id] = AdapterSpec(lora_id, join(self._folder, lora_id))
        return spec

    def _unknown(self, lora_id: object) -> RowError:
        names = self._specs.keys() | self._list().keys()
        if self._folder is not None and not names:
            return RowError("unknown_adapter", f"the registry {redact(self._folder)} holds no adapters")
        return self._unknown_names.error(lora_id, names)

    def _list(self) -> dict[str, bool]:
        if self._listed is None:
            self._listed = _list_folder(self._folder, self._options) if self._folder is not None else {}
        return self._listed

    def _leaves(self, name: str) -> bool:
        """Whether the folder or one of its two files is a symlink to outside the (local) registry folder."""
        assert self._folder is not None
        if is_remote(self._folder):
            return False
        root = os.path.realpath(connect(self._folder, {})[1])
        folder = os.path.join(root, name)
        paths = (folder, os.path.join(folder, CONFIG_NAME), os.path.join(folder, WEIGHTS_NAME))
        return any(
            os.path.islink(path) and os.path.commonpath([root, os.path.realpath(path)]) != root for path in paths
        )


def _check_folder(url: str, options: Mapping[str, Any]) -> None:
    folder = Folder(url, options)
    if not folder.exists():
        raise AdapterError(f"{redact(url)}: there is no such folder of adapters (a TOML registry's name ends in .toml)")
    if folder.stamp(CONFIG_NAME) is not None:
        raise AdapterError(f"{redact(url)} is one adapter, not a folder of them: give its parent, or --lora-modules")


def _list_folder(url: str, options: Mapping[str, Any]) -> dict[str, bool]:
    names = {}
    for path, is_folder, is_link in Folder(url, options).entries():
        name = path.rstrip("/").rpartition("/")[2]
        if is_folder and _is_name(name):
            names[name] = is_link
    return names


def _is_name(lora_id: object) -> bool:
    """Whether it can be a folder's name: one visible component, no separator, no control of the path."""
    return (
        isinstance(lora_id, str)
        and 0 < len(lora_id) <= _MAX_NAME
        and not lora_id.startswith(".")
        and not any(c in lora_id for c in "/\\\0")
    )
