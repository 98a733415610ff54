"""Paths and URLs of inputs and outputs: which store they are in, and how they are shown.

What is shown, stored or logged never holds credentials: no storage options, no user part, no query string.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from punica_batch.config import JobConfig
from punica_batch.errors import UsageError

PARQUET_SUFFIXES = (".parquet", ".pq", ".parq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_MAGIC = frozenset("*?[")


def open_store(url: str, storage_options: dict[str, str]) -> tuple[Any, str]:
    """(fsspec file system, path in it); a local path as ``absolute`` makes it. Raises ``UsageError`` for a bad URL."""
    protocol = fsspec.utils.get_protocol(url)
    options = {} if protocol in ("file", "local") else storage_options
    try:
        store, path = fsspec.core.url_to_fs(os.path.expanduser(url), **options)
    except (ValueError, ImportError, TypeError) as error:
        raise UsageError(f"cannot open {shown_url(url)}: {_one_line(error)}") from error
    return store, absolute(path) if is_local(store) else path


def absolute(path: str) -> str:
    """A local path from the root on, without ``..``: that goes as the kernel does, behind a symlink not to the folder
    before it. Without a ``/`` at its end."""
    segments = os.path.join(os.getcwd(), os.path.expanduser(path)).split("/")
    if ".." not in segments:
        return os.path.normpath("/".join(segments))
    stop = len(segments) - segments[::-1].index("..")
    return os.path.normpath("/".join([os.path.realpath("/".join(segments[:stop])), *segments[stop:]]))


def whole(name: str) -> str:
    """``name``, a URL or local path, as it can be used from any folder and be shown; a ``/`` at its end is kept."""
    slash = "/" if name.endswith("/") else ""
    return shown_url(name) if "://" in name else absolute(name) + slash


def is_local(store: Any) -> bool:
    return isinstance(store, LocalFileSystem)


def shown(store: Any, path: str) -> str:
    """``path`` as a person may see it and a plan may store it."""
    if is_local(store):
        return path
    protocol = store.protocol if isinstance(store.protocol, str) else store.protocol[0]
    return shown_url(path if "://" in path else f"{protocol}://{path.lstrip('/')}")


def shown_url(url: str) -> str:
    """``url`` without user part and query string."""
    protocol, separator, rest = url.partition("://")
    if not separator:
        return url
    if protocol.rpartition(":")[2] in ("http", "https"):
        rest = rest.partition("?")[0]
    host, slash, path = rest.partition("/")
    return f"{protocol}://{host.rpartition('@')[2]}{slash}{path}"


def has_magic(path: str) -> bool:
    """Whether ``path`` is a glob."""
    return not _MAGIC.isdisjoint(path)


def output_path(config: JobConfig) -> str:
    """``-o``, or ``default_output``. Raises ``UsageError`` when there is neither, and for a name that looks like a file
    of another format: it would become a folder."""
    path = default_output(config) if config.output is None else config.output
    if path is None:
        raise UsageError("several inputs or a glob give no name for the output: say it with -o")
    if "::" in path:
        raise UsageError(f"-o {shown_url(path)}: an output cannot be a chain of stores (::): give one URL or path")
    suffix = PurePosixPath(path).suffix
    is_known = path.endswith("/") or suffix in ("", *PARQUET_SUFFIXES, *JSONL_SUFFIXES)
    if not is_known and not os.path.isdir(os.path.expanduser(path)):
        raise UsageError(
            f"-o {shown_url(path)}: {suffix} files cannot be written: name it .parquet, .jsonl (for OpenAI Batch "
            f"input), or {shown_url(path)}/ for a folder of Parquet files"
        )
    return path


def default_output(config: JobConfig) -> str | None:
    """Beside the single input: ``x.generations.parquet`` (``.jsonl`` for OpenAI batch files); None for a glob."""
    if len(config.inputs) != 1 or has_magic(config.inputs[0]):
        return None
    base = config.inputs[0].partition("?")[0].rstrip("/")
    suffix = PurePosixPath(base).suffix
    stem = base.removesuffix(suffix) if suffix in PARQUET_SUFFIXES + JSONL_SUFFIXES else base
    return f"{stem}.generations{'.jsonl' if suffix in JSONL_SUFFIXES else '.parquet'}"


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
