"""Content digests of adapter files, and those of weights remembered between runs.

Weights are digested by BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) on the caller's thread alone, as many are
at once, and without the interpreter's lock; all that is small by SHA-256.

The cache is one JSON file in ``PUNICA_BATCH_CACHE`` (default: ``punica-batch`` in the user's cache folder). It is
bounded, replaced whole by rename, merged with what other processes wrote, and only a convenience: whatever cannot be
read is ignored, whatever cannot be written is recomputed next time. Paths are stored hashed, as URLs may hold secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from blake3 import blake3

from punica_batch.adapters.store import CHUNK_BYTES, FileStamp, Folder

MAX_ENTRIES = 10_000
_FLUSH_EVERY = 500
_FLUSH_SECONDS = 5.0  # after the first new entry: a worker is not asked before it ends
_MAX_CACHE_BYTES = 16 << 20
_ALGORITHM = "blake3"  # names the entries in the file; those of another one are neither read nor kept
# A file written so recently could be written again within the clock's tick: size and time would not tell.
_SETTLE_SECONDS = 2.0


def cache_folder() -> Path:
    """``PUNICA_BATCH_CACHE``, or ``punica-batch`` in the platform's folder for a user's caches; in that for temporary
    files where the user has no home."""
    chosen = os.environ.get("PUNICA_BATCH_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "punica-batch"
    try:
        home = Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"punica-batch-{os.getuid()}"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "punica-batch"


def combine(config_sha256: str, weights_blake3: str) -> str:
    """An adapter's digest: SHA-256 over its config's and its weights' digests (32 raw bytes each), in hex."""
    return hashlib.sha256(bytes.fromhex(config_sha256) + bytes.fromhex(weights_blake3)).hexdigest()


class DigestCache:
    """File identity and stamp → BLAKE3 (64 hex digits). Usable from several threads. Written now and then, and at the
    end of ``with``."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or cache_folder()) / "digests.json"
        self._entries = _read(self._path)
        self._new: dict[str, list[Any]] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def get(self, identity: str, stamp: FileStamp) -> str | None:
        with self._lock:
            entry = self._entries.get(_key(identity))
        return str(entry[-1]) if entry is not None and entry[:-1] == _stamp_fields(stamp) else None

    def put(self, identity: str, stamp: FileStamp, digest: str) -> None:
        changed_ns = stamp.changed_ns
        if stamp.version is None or (changed_ns is not None and time.time() - changed_ns / 1e9 < _SETTLE_SECONDS):
            return
        key, entry = _key(identity), [*_stamp_fields(stamp), digest]
        with self._lock:
            if self._entries.get(key) == entry:
                return
            self._entries[key] = self._new[key] = entry
            count = len(self._new)
        if count >= _FLUSH_EVERY:
            self.flush()
        elif self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(_FLUSH_SECONDS, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Writes what is new. A cache that cannot be written is left as it is."""
        with self._lock:
            if not self._new:
                return
            new, self._new = self._new, {}
            with contextlib.suppress(OSError):
                _write(self._path, new)

    def __enter__(self) -> DigestCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        # a thread that wakes up while the interpreter ends can take the process down with it
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self.flush()


def file_digest(folder: Folder, name: str, stamp: FileStamp, cache: DigestCache | None) -> str | None:
    """BLAKE3 (hex) of a file that had ``stamp``; None if it has changed since."""
    identity = folder.identity(name)
    known = cache.get(identity, stamp) if cache is not None else None
    if cache is not None and known is not None:
        now = folder.stamp(name)
        if now is not None and cache.get(identity, now) == known:
            return known
    digest, scratch = blake3(), memoryview(bytearray(min(CHUNK_BYTES, max(stamp.size, 1))))
    count = folder.stream(name, stamp.size, lambda _, length: scratch[:length], digest.update)
    if count != stamp.size or folder.stamp(name) != stamp:
        return None
    if cache is not None:
        cache.put(identity, stamp, digest.hexdigest())
    return digest.hexdigest()


def _key(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _stamp_fields(stamp: FileStamp) -> list[Any]:
    return [stamp.size, stamp.version, stamp.inode, stamp.changed_ns]


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        if path.stat().st_size > _MAX_CACHE_BYTES:
            return {}
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    entries = raw.get(_ALGORITHM) if isinstance(raw, dict) else None
    if not isinstance(entries, dict):
        return {}
    return {key: entry for key, entry in entries.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 5:
        return False
    digest = entry[-1]
    return isinstance(digest, str) and len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)


def _write(path: Path, new: dict[str, list[Any]]) -> None:
    """Old entries first, so that the bound drops those longest unwritten. Two writers at once: the later one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = _read(path)
    for key in new:
        entries.pop(key, None)
    entries.update(new)
    kept = dict(list(entries.items())[-MAX_ENTRIES:])
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps({_ALGORITHM: kept}))  # not dump, which is slow and keeps the interpreter
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
