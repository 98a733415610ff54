"""Which files the inputs name, in a fixed order, and what identifies each.

An input is a file, a folder (read recursively), a glob or an fsspec URL of one of these. Inputs keep the order they are
given in; files inside a folder or glob are sorted by path. Hidden names, names that begin with ``_``, state folders
(``*.punica``) and the job's own output are left out. ``key=value`` folders right above a file become columns.

A file's identity is its path, size, time or etag, and a digest of its Parquet footer (of JSON lines: of the first and
last 64 KiB): nothing is read whole just to be named.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from punica_batch.config import JobConfig
from punica_batch.data.paths import (
    JSONL_SUFFIXES,
    PARQUET_SUFFIXES,
    default_output,
    has_magic,
    is_local,
    open_store,
    shown,
    shown_url,
)
from punica_batch.errors import InputError, StoreAway, UsageError

_ENDS_BYTES = 64 << 10
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class FileIdentity:
    """What a plan binds of one input file. ``mtime`` is nanoseconds, a store's time, or an etag, as text."""

    path: str
    size: int
    mtime: str | None
    footer: str
    rows: int


@dataclass(frozen=True)
class InputFile:
    """One file before it is opened. ``partition``: hive columns, values as text (None: null)."""

    store: Any
    path: str
    size: int
    mtime: str | None
    partition: tuple[tuple[str, str | None], ...]

    @property
    def name(self) -> str:
        return shown(self.store, self.path)

    @property
    def is_jsonl(self) -> bool:
        return self.path.endswith(JSONL_SUFFIXES)

    def open(self) -> Any:
        """A binary file object. Raises ``InputError`` or ``StoreAway``."""
        try:
            return self.store.open(self.path, "rb")
        except FileNotFoundError as error:
            raise InputError(f"{self.name} is gone: was it moved while the job was starting?") from error
        except OSError as error:
            raise read_error(self, error) from error

    def identity(self, footer: bytes, rows: int) -> FileIdentity:
        return FileIdentity(self.name, self.size, self.mtime, hashlib.sha256(footer).hexdigest(), rows)


def read_error(file: InputFile, error: OSError) -> Exception:
    """What to raise when ``file`` cannot be read: the store's fault may pass, a local one does not by itself."""
    reason = error.strerror or type(error).__name__
    if is_local(file.store) or isinstance(error, PermissionError):
        return InputError(f"cannot read {file.name}: {reason}")
    return StoreAway(f"cannot read {file.name}: {reason}; run the same command again when the store answers")


def find_files(config: JobConfig) -> list[InputFile]:
    """The files of ``config.inputs``, all Parquet or all JSON lines.

    Raises:
        InputError: nothing there, or both kinds at once.
        UsageError: no input, or the output is one of the inputs.
    """
    if not config.inputs:
        raise UsageError("no input given: name a Parquet file, folder or glob")
    own = config.output or default_output(config)
    output = None
    if own is not None:
        store, path = open_store(own, config.storage_options)
        output = (type(store), path.rstrip("/"))
    files = [file for name in config.inputs for file in _find(name, config.storage_options, output)]
    kinds = {file.is_jsonl for file in files}
    if len(kinds) > 1:
        raise InputError("the inputs mix Parquet and JSON lines: run them as two jobs")
    return files


def _find(name: str, options: dict[str, str], output: tuple[type, str] | None) -> list[InputFile]:
    store, path = open_store(name, options)
    try:
        if not has_magic(path) or store.exists(path):
            is_folder = store.isdir(path)
            infos = store.find(path, detail=True).values() if is_folder else [store.info(path)]
            root = path.rstrip("/") if is_folder else path
        else:
            is_folder = True
            infos = _glob(store, path)
            root = path[: min(path.find(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
    except FileNotFoundError as error:
        raise InputError(f"no such file or folder: {shown_url(name)}") from error
    except OSError as error:
        raise StoreAway(f"cannot list {shown_url(name)}: {error.strerror or type(error).__name__}") from error
    if not is_folder and output == (type(store), path.rstrip("/")):
        raise UsageError(f"the output {shown_url(name)} is the input: give another name with -o")
    found = {str(info["name"]): info for info in infos if info["type"] == "file"}
    names = sorted(found)
    if is_folder:
        names = [one for one in names if _is_data(one, root) and not _is_output(store, one, output)]
    if not names:
        raise InputError(f"no Parquet or JSON lines files in {shown_url(name)}")
    return [_input_file(store, found[one], one) for one in names]


def _glob(store: Any, pattern: str) -> Iterable[dict[str, Any]]:
    matches: dict[str, dict[str, Any]] = store.glob(pattern, detail=True)
    for path, info in sorted(matches.items()):
        if info["type"] == "directory":
            yield from store.find(path, detail=True).values()
        else:
            yield info


def _is_data(path: str, root: str) -> bool:
    segments = path.removeprefix(root).strip("/").split("/")
    hidden = any(one.startswith((".", "_")) or one.endswith(".punica") for one in segments)
    return not hidden and path.endswith(PARQUET_SUFFIXES + JSONL_SUFFIXES)


def _is_output(store: Any, path: str, output: tuple[type, str] | None) -> bool:
    if output is None:
        return False
    kind, own = output
    return isinstance(store, kind) and (path == own or path.startswith(own + "/"))


def _input_file(store: Any, info: dict[str, Any], path: str) -> InputFile:
    return InputFile(store, path, int(info["size"] or 0), _version(store, info), _partition(path))


def _version(store: Any, info: dict[str, Any]) -> str | None:
    if is_local(store):
        return str(os.stat(info["name"]).st_mtime_ns)
    for key in ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created"):
        if info.get(key) is not None:
            return str(info[key])
    return None


def _partition(path: str) -> tuple[tuple[str, str | None], ...]:
    """The unbroken run of ``key=value`` folders that ends at the file, whatever part of it the user named."""
    values: list[tuple[str, str | None]] = []
    for segment in reversed(path.split("/")[:-1]):
        key, separator, value = segment.partition("=")
        if not (separator and key):
            break
        values.insert(0, (unquote(key), None if value == HIVE_NULL else unquote(value)))
    return tuple(values)


def ends_digest(file: InputFile) -> bytes:
    """The first and last 64 KiB of ``file``."""
    with file.open() as stream:
        head = stream.read(_ENDS_BYTES)
        stream.seek(max(0, file.size - _ENDS_BYTES))
        return bytes(head) + bytes(stream.read(_ENDS_BYTES))
