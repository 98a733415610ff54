"""Adapter files on local disk or any fsspec store: stamps, bounded reads, retries.

A file that is not there, or may not be read, is the adapter's fault (``AdapterError``). Anything else that goes wrong
is the store's: it is tried again with growing pauses, then ``StoreAway``. Messages carry neither credentials that an
URL may hold nor a remote library's text, which may repeat a signed URL.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from punica_batch.errors import AdapterError, PunicaError, StoreAway
from punica_batch.urls import redact

RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds
CHUNK_BYTES = 4 << 20

_LASTING = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL,
})  # fmt: skip
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one content of a path from the next without reading it. ``version`` None: the store gives nothing.

    ``changed_ns``: a local file's ctime, nanoseconds since 1970: no one can set it back, as one can the time in
    ``version``, but a new link or mode moves it as well: it tells whether a remembered digest still holds, not whether
    two stamps are of one content.
    """

    size: int
    version: str | None
    inode: int | None = None
    changed_ns: int | None = field(default=None, compare=False)


class Folder:
    """One adapter's folder. ``url`` is a local path or an fsspec URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._options = dict(storage_options or {})

    def shown(self, name: str = "") -> str:
        """The path for messages, without credentials."""
        return redact(join(self.url, name) if name else self.url)

    def stamp(self, name: str) -> FileStamp | None:
        """None when there is no such file. Raises ``AdapterError`` (may not be read) or ``StoreAway``."""
        return self._retry(name, lambda fs, path: _stamp(fs, path))

    def exists(self) -> bool:
        """Whether there is a folder here. Stores without folders: whether anything lies under it."""
        return self._retry("", lambda fs, path: bool(fs.isdir(path.rstrip("/") or "/")))

    def entries(self) -> list[tuple[str, bool, bool]]:
        """What lies in the folder: (path, is a folder, is a symlink). One listing, nothing opened."""
        return self._retry("", _entries)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer at the file's end."""

        def read(fs: Any, path: str) -> bytes:
            with fs.open(path, "rb", cache_type="none") as file:
                file.seek(start)
                return bytes(file.read(stop - start))

        return self._retry(name, read)

    def stream(
        self,
        name: str,
        size: int,
        memory: Callable[[int, int], memoryview],
        sink: Callable[[memoryview], object],
    ) -> int:
        """The file's first ``size`` bytes in one sequential pass.

        Each piece is read into ``memory(position, length)`` and then given to ``sink``. Returns how many bytes there
        are, at most ``size + 1`` (one more is asked for). A store that fails in mid-file is asked again from there.
        """
        done = 0

        def read(fs: Any, path: str) -> int:
            nonlocal done
            with fs.open(path, "rb", block_size=CHUNK_BYTES, cache_type="readahead") as file:
                file.seek(done)
                while done < size:
                    piece = memory(done, min(CHUNK_BYTES, size - done))
                    count = file.readinto(piece)
                    if not count:
                        return done
                    sink(piece[:count])
                    done += count
                return done + len(file.read(1))

        return self._retry(name, read)

    def read_small(self, name: str, most: int) -> tuple[FileStamp, bytes] | None:
        """A file's stamp and content, which is left out where it has more than ``most`` bytes. None: no such file."""
        if not is_remote(self.url):
            return self._retry(name, lambda fs, path: _read_small(path, most))
        stamp = self.stamp(name)
        if stamp is None:
            return None
        return stamp, self.read(name, 0, stamp.size) if stamp.size <= most else b""

    def read_into(self, name: str, memory: memoryview) -> tuple[int, FileStamp | None]:
        """Fills ``memory`` with the file's first bytes, a local file's in as few calls as there can be, as each takes a
        turn at the interpreter's lock. Returns how many bytes there are, at most ``len(memory) + 1``, and the stamp
        that the file has then."""
        if is_remote(self.url):
            count = self.stream(name, len(memory), lambda at, length: memory[at : at + length], lambda piece: None)
            return count, self.stamp(name)
        return self._retry(name, lambda fs, path: _read_into(path, memory))

    def identity(self, name: str) -> str:
        """The file's full address, the same for every way to write it; may hold credentials: never shown or stored."""
        fs, root = connect(self.url, self._options)
        return str(fs.unstrip_protocol(join(root, name)))

    def _retry(self, name: str, action: Callable[[Any, str], T]) -> T:
        for pause in (*RETRY_PAUSES, None):
            try:
                fs, root = connect(self.url, self._options)
                return action(fs, join(root, name))
            except PunicaError:
                raise
            except Exception as exc:
                where = self.shown(name)
                if is_lasting(exc):
                    raise AdapterError(f"{where}: {reason(exc)}") from exc
                if pause is None:
                    raise StoreAway(
                        f"{where}: the store does not answer after {len(RETRY_PAUSES) + 1} tries ({reason(exc)}); "
                        "run the same command again when it does"
                    ) from exc
            time.sleep(pause)
        raise AssertionError("unreachable")


def connect(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """(fsspec filesystem, path in it). A wrong URL or a missing driver is an ``AdapterError``."""
    if os.path.isabs(url):
        return _connect_local(url)
    options = storage_options if is_remote(url) else {}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError, TypeError) as exc:
        hint = f"; {exc}" if isinstance(exc, ImportError) else ""
        raise AdapterError(f"{redact(url)}: no file store for this URL{hint}") from exc
    return fs, str(path)


@lru_cache(maxsize=4096)
def _connect_local(path: str) -> tuple[Any, str]:
    """Kept, as taking a path apart costs more than opening the file."""
    fs, path = fsspec.core.url_to_fs(path)
    return fs, str(path)


def is_remote(url: str) -> bool:
    return "://" in url and not url.startswith(("file://", "local://"))


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def is_lasting(exc: Exception) -> bool:
    """Whether trying again cannot help."""
    if isinstance(exc, FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError):
        return True
    if isinstance(exc, OSError):
        return exc.errno in _LASTING
    return isinstance(exc, ValueError | TypeError | NotImplementedError)


def reason(exc: Exception) -> str:
    if isinstance(exc, FileNotFoundError):
        return "no such file"
    if isinstance(exc, OSError) and exc.errno is not None and exc.strerror:
        return exc.strerror
    return type(exc).__name__


def _stamp(fs: Any, path: str) -> FileStamp | None:
    if isinstance(fs, LocalFileSystem):  # fsspec gives a symlink's own time and inode, not its target's
        return _local_stamp(path)
    try:
        info = fs.info(path)
    except FileNotFoundError:
        return None
    if info.get("type") == "directory":
        return None
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), None)
    return FileStamp(size=int(info["size"]), version=version)


def _local_stamp(path: str) -> FileStamp | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _stamp_of(path, status)


def _stamp_of(path: str, status: os.stat_result) -> FileStamp:
    if not stat.S_ISREG(status.st_mode):
        raise AdapterError(f"{redact(path)}: not a regular file")
    return FileStamp(status.st_size, str(status.st_mtime_ns), status.st_ino, status.st_ctime_ns)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Its descriptor. A FIFO does not hold this up."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_small(path: str, most: int) -> tuple[FileStamp, bytes] | None:
    try:
        with _opened(path) as file:
            stamp = _stamp_of(path, os.fstat(file))
            content = bytearray(stamp.size if stamp.size <= most else 0)
            return stamp, bytes(content[: _fill(file, memoryview(content))])
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_into(path: str, memory: memoryview) -> tuple[int, FileStamp]:
    with _opened(path) as file:
        count = _fill(file, memory)
        stamp = _stamp_of(path, os.fstat(file))
        return min(stamp.size, count + 1) if count == len(memory) else count, stamp


def _fill(descriptor: int, memory: memoryview) -> int:
    done = 0
    while done < len(memory):
        count = os.readv(descriptor, [memory[done:]])
        if not count:
            break
        done += count
    return done


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symlink that leads to itself is no folder, and no other entry's fault
        return False


def _entries(fs: Any, path: str) -> list[tuple[str, bool, bool]]:
    path = path.rstrip("/") or "/"
    if isinstance(fs, LocalFileSystem):
        with os.scandir(path) as found:
            return [(entry.path, _is_folder(entry), entry.is_symlink()) for entry in found]
    return [(str(info["name"]), info.get("type") == "directory", False) for info in fs.ls(path, detail=True)]
