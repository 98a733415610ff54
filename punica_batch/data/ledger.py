"""Which content each adapter had when it was first used.

One checksummed line a name in ``adapters``, appended and fsynced before any row of that adapter is journalled. A name
that comes back with another digest is refused, in this run or a later one, whichever slice of the output used it first.
Of a remote output the commits carry the digests too, as the work folder may be lost.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from punica_batch.data.commits import PartInfo, append_line, read_lines
from punica_batch.data.disk import disk_errors, make_folder
from punica_batch.errors import BindingError


class AdapterLedger:
    """Digests by adapter name in ``path``; ``commits`` are the parts of all slices known so far."""

    def __init__(self, path: Path, commits: Iterable[PartInfo], *, remote: bool) -> None:
        self._path = path
        self._committed: dict[str, str] = {}
        self._remote = remote
        for info in commits:
            self._committed.update(info.adapters)
        self._digests: dict[str, str] = {}
        self._size = 0  # of the file when it was last read or written
        self._read(repair=False)

    def _read(self, *, repair: bool) -> None:
        """What other slices have added. ``repair`` cuts off a torn last line, so that the next can be appended."""
        if self._file_size() == self._size:
            return
        for value in read_lines(self._path, repair=repair):
            assert isinstance(value, dict)
            self._digests[value["name"]] = value["sha256"]
        self._size = self._file_size() if repair else 0

    def _file_size(self) -> int:
        with disk_errors("read", self._path):
            return self._path.stat().st_size if self._path.exists() else 0

    @property
    def digests(self) -> dict[str, str]:
        return {**self._committed, **self._digests}

    def bind(self, digests: Mapping[str, str], *, rebind: bool = False) -> None:
        """Record ``digests`` by name. ``rebind`` accepts changed ones.

        Raises ``BindingError`` naming an adapter whose content is not what it was.
        """
        known = self.digests
        if all(known.get(name) == digest for name, digest in digests.items()):
            return
        with self._locked():
            self._read(repair=True)
            known = self.digests
            for name, digest in digests.items():
                if known.get(name, digest) != digest and not rebind:
                    raise BindingError(
                        f"adapter {name!r} (its files or its registry settings) was {known[name][:12]}… when its first "
                        f"rows ran, is {digest[:12]}…: bring the old ones back, or start over with `run --overwrite`"
                    )
            for name, digest in digests.items():
                if known.get(name) != digest:
                    append_line(self._path, {"name": name, "sha256": digest}, "adapters")
                    self._digests[name] = digest
            self._size = self._file_size()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_folder(self._path.parent)
        with disk_errors("open", self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def new_for_commit(self) -> dict[str, str]:
        """What the next commit must carry."""
        if not self._remote:
            return {}
        return {name: digest for name, digest in self._digests.items() if self._committed.get(name) != digest}

    def committed(self, info: PartInfo) -> None:
        self._committed.update(info.adapters)
