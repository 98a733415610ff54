"""Which parts are done: one checksummed line for each, in order of the parts.

Locally the lines are appended to one file and fsynced; a torn last line is cut off when the file is read. Remotely each
line is an object of its own. A later line for a part that is there already replaces it (that is what ``retry`` does).
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.disk import disk_error, disk_errors, fsync_folder, make_folder, write_all
from punica_batch.data.layout import Layout
from punica_batch.data.store import LocalStore, Store
from punica_batch.errors import BindingError


@dataclass(frozen=True)
class PartInfo:
    """One committed part: rows ``first_row`` to ``first_row + rows - 1``.

    ``errors``: rows by error code. ``finish_reasons``: samples by reason. ``adapters``: digests first used since the
    part before, by name (remote outputs, where nothing else keeps them).
    """

    index: int
    name: str
    first_row: int
    rows: int
    bytes: int
    sha256: str
    errors: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def error_rows(self) -> int:
        return sum(self.errors.values())


class CommitLog(Protocol):
    def load(self) -> list[PartInfo]:
        """The committed parts in order, without gaps."""

    def append(self, info: PartInfo) -> None:
        """Durable when this returns."""


def open_commits(layout: Layout, *, repair: bool = True) -> CommitLog:
    """``repair``: cut off a torn last line; only for who holds the lock."""
    if isinstance(layout.store, LocalStore):
        return FileCommits(layout.store.root / layout.in_shard("commits"), repair)
    return ObjectCommits(layout.store, layout.in_shard("commits"))


def checked_line(value: object) -> bytes:
    """``value`` as JSON behind its CRC-32, one line."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse_line(line: bytes) -> object | None:
    """What ``checked_line`` was given, or None when the line is torn or damaged."""
    crc, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text):
        return None
    value: object = json.loads(text)
    return value


def append_line(path: Path, value: object, crash_prefix: str) -> None:
    """Append ``checked_line(value)`` to ``path`` and fsync; on failure the file ends where it did before."""
    make_folder(path.parent)
    line = checked_line(value)
    new = not path.exists()
    with disk_errors("open", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        crashpoint(f"{crash_prefix}.write.before")
        try:
            write_all(descriptor, line[:12])
            if crash_prefix == "commit":
                crashpoint("commit.write.middle")
            write_all(descriptor, line[12:])
            crashpoint(f"{crash_prefix}.write.after")
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise disk_error(error, "write", path) from error
        if new:
            fsync_folder(path.parent)
    finally:
        os.close(descriptor)


def read_lines(path: Path, *, repair: bool = True) -> list[object]:
    """The good lines up to the first bad one; ``repair`` cuts off the rest."""
    with disk_errors("read", path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return []
    values, end = [], 0
    for line in data.splitlines(keepends=True):
        value = parse_line(line)
        if value is None:
            break
        values.append(value)
        end += len(line)
    if repair and end < len(data):
        with disk_errors("repair", path):
            os.truncate(path, end)
    return values


def _in_order(infos: list[PartInfo]) -> list[PartInfo]:
    parts: dict[int, PartInfo] = {}
    for info in infos:
        if parts and info.index not in parts and info.index != next(reversed(parts)) + 1:
            raise BindingError(
                f"the commits skip from {next(reversed(parts))} to {info.index}: start over with `run --overwrite`"
            )
        parts[info.index] = info
    return list(parts.values())


class FileCommits:
    def __init__(self, path: Path, repair: bool = True) -> None:
        self._path = path
        self._repair = repair

    def load(self) -> list[PartInfo]:
        return _in_order(
            [PartInfo(**value) for value in read_lines(self._path, repair=self._repair) if isinstance(value, dict)]
        )

    def append(self, info: PartInfo) -> None:
        append_line(self._path, asdict(info), "commit")
        crashpoint("commit.fsync.after")


class ObjectCommits:
    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def load(self) -> list[PartInfo]:
        names = [name for name in self._store.names(self._folder) if name.endswith(".json")]
        with ThreadPoolExecutor(16) as pool:
            lines = list(pool.map(lambda name: self._store.read(f"{self._folder}/{name}"), names))
        values = [parse_line(line or b"") for line in lines]
        bad = next((name for name, value in zip(names, values, strict=True) if not isinstance(value, dict)), None)
        if bad is not None:
            raise BindingError(f"{self._store.shown(self._folder)}/{bad} is damaged: start over with `run --overwrite`")
        return _in_order(
            sorted((PartInfo(**value) for value in values if isinstance(value, dict)), key=lambda i: i.index)
        )

    def append(self, info: PartInfo) -> None:
        crashpoint("commit.write.before")
        self._store.write(f"{self._folder}/{info.index:08d}.json", checked_line(asdict(info)))
        crashpoint("commit.write.after")
