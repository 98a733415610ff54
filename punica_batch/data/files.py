"""Which files the inputs name, in a fixed order, and what identifies each.

An input is a file, a folder (read recursively), a glob or an fsspec URL of one of these. Inputs keep the order they are
given in; files inside a folder or glob are sorted by path. Hidden names, names that begin with ``_``, state folders
(``*.punica``), the job's own output and, in folders, the outputs of other jobs are left out. ``key=value`` folders
right above a file become columns.

A file's identity is its path, size, time or etag, and a digest of its Parquet footer (of JSON lines: of the first and
last 64 KiB): nothing is read whole just to be named.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, count
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
)
from punica_batch.errors import InputError, JobError, StoreAway, UsageError

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
    """One file as it was found. ``partition``: hive columns, values as text (None: null). ``state``: what
    ``check_unchanged`` compares; of a store's file unknown until it is ``pinned``."""

    store: Any
    path: str
    size: int
    mtime: str | None
    partition: tuple[tuple[str, str | None], ...]
    state: tuple[Any, ...] | None = None

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

    def pinned(self) -> InputFile:
        """This file with its ``state`` known. A store's listing and its answer for one file may differ in form, so the
        latter is kept. Raises ``InputError`` or ``StoreAway``."""
        if self.state is not None:
            return self
        try:
            return replace(self, state=_state(self.store, self.path))
        except FileNotFoundError as error:
            raise InputError(f"{self.name} is gone: was it moved while the job was starting?") from error
        except OSError as error:
            raise read_error(self, error) from error

    def check_unchanged(self) -> None:
        """Raises ``JobError`` when another content has come in the file's place since it was found: what was read then
        would stand beside what is read now. ``StoreAway`` when the store does not answer."""
        try:
            now = _state(self.store, self.path)
        except FileNotFoundError:
            now = None
        except OSError as error:
            raise read_error(self, error) from error
        if now is None or now != self.state:
            raise JobError(
                f"input {self.name} changed while the job ran: bring the old file back and run the same command again, "
                "or start over with `run --overwrite`"
            )

    def identity(self, footer: bytes, rows: int) -> FileIdentity:
        return FileIdentity(self.name, self.size, self.mtime, hashlib.sha256(footer).hexdigest(), rows)


def read_error(file: InputFile, error: OSError) -> Exception:
    """What to raise when ``file`` cannot be read: the store's fault may pass, a local one does not by itself."""
    reason = error.strerror or type(error).__name__
    if is_local(file.store) or isinstance(error, PermissionError):
        return InputError(f"cannot read {file.name}: {reason}")
    return StoreAway(f"cannot read {file.name}: {reason}; run the same command again when the store answers")


def how_to_convert(file: InputFile, kind: str, options: str = "") -> str:
    """What to do with a file that pyarrow's ``kind`` ("csv", "json") reads; for a local one a command, which replaces
    nothing that is there now."""
    if not is_local(file.store):
        return "convert it to Parquet"
    stem = os.path.splitext(file.path.removesuffix(".gz"))[0]
    names = (f"{stem}{'' if n == 1 else f'-{n}'}.parquet" for n in count(1))
    target = next(name for name in names if not os.path.lexists(name))
    read = f"r.read_{kind}({file.path!r}, read_options=r.ReadOptions(block_size=2**28){options})"
    code = f"import pyarrow.{kind} as r, pyarrow.parquet as p; p.write_table({read}, {target!r})"
    return f"convert it to Parquet: {shlex.join(['python', '-c', code])}"


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
        output = (type(store), _real(store, path))
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
        raise InputError(f"no such file or folder: {shown(store, path)}") from error
    except OSError as error:
        raise StoreAway(f"cannot list {shown(store, path)}: {error.strerror or type(error).__name__}") from error
    if not is_folder and output == (type(store), _real(store, path)):
        raise UsageError(f"the output {shown(store, path)} is the input: give another name with -o")
    found = {str(info["name"]): info for info in infos if info["type"] == "file"}
    names = sorted(found)
    if is_folder:
        earlier = _outputs(names, root)
        names = [one for one in names if _is_data(one, root) and not _is_below(one, earlier)]
        names = [one for one in names if output is None or not _is_own(store, one, output)]
    if not names:
        raise InputError(f"no Parquet or JSON lines files in {shown(store, path)}")
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


def _outputs(names: Iterable[str], root: str) -> set[str]:
    """The files and folders below ``root`` that state lies in or beside: the outputs of other jobs."""
    found = set()
    for name in names:
        folders = name.removeprefix(root).strip("/").split("/")[:-1]
        for depth, folder in enumerate(folders):
            above = "/".join([root, *folders[:depth]])
            if folder == "_punica" and depth:
                found.add(above)
            elif folder.endswith(".punica"):
                found.add(f"{above}/{folder.removesuffix('.punica')}")
    return found


def _is_below(path: str, tops: set[str]) -> bool:
    """Whether ``path`` is one of ``tops`` or lies in one."""
    return any(top in tops for top in accumulate(path.split("/"), "{}/{}".format)) if tops else False


def _is_own(store: Any, path: str, output: tuple[type, str]) -> bool:
    kind, own = output
    real = _real(store, path)
    return isinstance(store, kind) and (real == own or real.startswith(own + "/"))


def _real(store: Any, path: str) -> str:
    """One name for all links to it."""
    return os.path.realpath(path) if is_local(store) else path.rstrip("/")


def _input_file(store: Any, info: dict[str, Any], path: str) -> InputFile:
    if is_local(store):
        state = _state(store, path)
        return InputFile(store, path, state[0], str(state[1]), _partition(path), state)
    return InputFile(store, path, int(info["size"] or 0), _version(info), _partition(path))


def _state(store: Any, path: str) -> tuple[Any, ...]:
    """What tells one content of ``path`` from the next: size, time and inode, or a store's size and version."""
    if is_local(store):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns, status.st_ino
    store.invalidate_cache(store._parent(path))
    info = store.info(path)
    return info["size"], _version(info)


def _version(info: dict[str, Any]) -> str | None:
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
