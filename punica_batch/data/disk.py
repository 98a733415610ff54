"""Small durable steps on the local disk, with this package's errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from punica_batch.errors import DiskFull, JobError, PunicaError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_error(error: OSError, what: str, path: Path | str) -> PunicaError:
    """The error to raise for ``error`` while doing ``what`` to ``path``: ``DiskFull`` or ``JobError``."""
    if error.errno in _FULL:
        return DiskFull(f"no room on the disk to {what} {path}: free some, then run the same command again")
    return JobError(f"cannot {what} {path}: {error.strerror or error}")


@contextmanager
def disk_errors(what: str, path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(error, what, path) from error


def make_folder(path: Path) -> None:
    """Create ``path`` and its parents, each made durable in its own parent."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with disk_errors("create", path):
        path.mkdir(exist_ok=True)
        fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make renames and deletions in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """``path`` holds ``data`` in full, durably, or what it held before: staged beside it, then renamed."""
    staged = path.with_name(path.name + ".tmp")
    with disk_errors("write", path):
        try:
            with open(staged, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, path)
        except OSError:
            with suppress(OSError):
                staged.unlink()
            raise
        fsync_folder(path.parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """``os.write`` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
