"""Where the output and its state are kept: a local folder, or a folder of an fsspec store.

Names are relative to that folder, with ``/``. Both kinds write a name whole or not at all. A remote store is asked for
nothing but put, get, list, copy and delete: no renames, no locks; when it does not answer it is asked again with
growing pauses, then ``StoreAway`` is raised.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.disk import disk_errors, fsync_folder, make_folder, write_whole
from punica_batch.data.paths import shown
from punica_batch.errors import StoreAway, UsageError

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
T = TypeVar("T")


class Store(ABC):
    """A folder that holds an output. ``is_local``: paths of it can be opened, locked and renamed."""

    is_local: bool

    @abstractmethod
    def shown(self, name: str) -> str:
        """``name`` in full, for messages."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The whole content, or None when there is no such name."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Set the whole content."""

    @abstractmethod
    def publish(self, staged: Path, name: str) -> None:
        """Make the local file ``staged`` (fsynced) appear whole under ``name``; ``staged`` is gone afterwards."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """A seekable binary file."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes, or None when there is no such name."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename, or copy and delete. ``target`` is whole at any time."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names (without the folder) of the files and folders in ``folder``, sorted; none when it is not there."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all in it; no error when it is not there."""


class LocalStore(Store):
    is_local = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def shown(self, name: str) -> str:
        return str(self.root / name)

    def read(self, name: str) -> bytes | None:
        with disk_errors("read", self.root / name):
            try:
                return (self.root / name).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        make_folder((self.root / name).parent)
        write_whole(self.root / name, data)

    def publish(self, staged: Path, name: str) -> None:
        target = self.root / name
        make_folder(target.parent)
        crashpoint("part.rename.before")
        with disk_errors("write", target):
            os.replace(staged, target)
            crashpoint("part.rename.after")
            fsync_folder(target.parent)
        crashpoint("part.fsync_folder.after")

    def open(self, name: str) -> Any:
        with disk_errors("read", self.root / name):
            return open(self.root / name, "rb")

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return None

    def move(self, source: str, target: str) -> None:
        make_folder((self.root / target).parent)
        with disk_errors("write", self.root / target):
            os.replace(self.root / source, self.root / target)
            fsync_folder((self.root / target).parent)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        path = self.root / name
        with disk_errors("delete", path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class RemoteStore(Store):
    """A folder of an fsspec file system, reached by ``root``."""

    is_local = False

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def shown(self, name: str) -> str:
        return shown(self._fs, self._path(name))

    def _ask(self, name: str, action: Callable[[], T]) -> T:
        for pause in (*_PAUSES, None):
            try:
                return action()
            except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
                raise
            except PermissionError as error:
                raise UsageError(f"no permission for {self.shown(name)}: check the credentials") from error
            except (OSError, TimeoutError) as error:
                if pause is None:
                    reason = error.strerror or type(error).__name__
                    raise StoreAway(
                        f"{self.shown(name)}: the store does not answer ({reason}); run it again later"
                    ) from error
                time.sleep(pause)
        raise AssertionError("unreachable")

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._ask(name, lambda: self._fs.cat_file(self._path(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self._ask(name, lambda: self._fs.pipe_file(self._path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Write ``name`` unless it is there already; whether this call did. Raises ``UsageError`` if unsupported."""
        try:
            self._ask(name, lambda: self._fs.pipe_file(self._path(name), data, mode="create"))
        except FileExistsError:
            return False
        except (TypeError, ValueError, NotImplementedError) as error:
            raise self.no_exclusive_create() from error
        return True

    def no_exclusive_create(self) -> UsageError:
        return UsageError(
            f"{self.shown('')}: this store cannot create a file exclusively, so two runs could not be told apart: "
            "write to a local folder and copy it"
        )

    def publish(self, staged: Path, name: str) -> None:
        crashpoint("part.rename.before")
        self._ask(name, lambda: self._fs.put_file(str(staged), self._path(name)))
        crashpoint("part.rename.after")
        staged.unlink()

    def open(self, name: str) -> Any:
        return self._ask(name, lambda: self._fs.open(self._path(name), "rb"))

    def size(self, name: str) -> int | None:
        try:
            return int(self._ask(name, lambda: self._fs.info(self._path(name)))["size"])
        except FileNotFoundError:
            return None

    def move(self, source: str, target: str) -> None:
        self._ask(target, lambda: self._fs.cp_file(self._path(source), self._path(target)))
        self.remove(source)

    def names(self, folder: str) -> list[str]:
        def listing() -> list[str]:
            self._fs.invalidate_cache(self._path(folder))
            return list(self._fs.ls(self._path(folder), detail=False))

        try:
            return sorted({path.rstrip("/").rpartition("/")[2] for path in self._ask(folder, listing)})
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(name, lambda: self._fs.rm(self._path(name), recursive=True))
