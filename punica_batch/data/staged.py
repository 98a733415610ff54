"""Files being written: hashed on the way, fsynced before they get their name, gone when the writing fails."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.disk import disk_error, make_folder
from punica_batch.errors import DiskFull


class StagedFile:
    """A file-like sink. After a failed write it swallows what follows, so that a Parquet writer can be closed."""

    def __init__(self, path: Path, middle: str) -> None:
        self.path = path
        self.size = 0
        self._digest = hashlib.sha256()
        self._middle = middle
        self._failed: OSError | None = None
        self._abandoned = False
        self._file = open(path, "wb")  # noqa: SIM115 - closed by staged()

    def write(self, data: bytes | memoryview) -> int:
        if self._failed is None and not self._abandoned:
            try:
                self._file.write(data)
            except OSError as error:
                self._failed = error
                raise
            self._digest.update(data)
            crashpoint(self._middle)
        length = memoryview(data).nbytes
        self.size += length
        return length

    def writable(self) -> bool:
        return True

    @property
    def closed(self) -> bool:
        return self._file.closed

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing to do before ``finish``."""

    def close(self) -> None:
        """Nothing to do before ``finish``."""

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def finish(self) -> None:
        self._file.flush()
        crashpoint("part.fsync.before")
        os.fsync(self._file.fileno())
        crashpoint("part.fsync.after")
        self._file.close()

    def give_up(self) -> None:
        """What is written from now on is lost: something else than this file has failed."""
        self._abandoned = True

    def abandon(self) -> None:
        self.give_up()
        with suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


@contextmanager
def staged(path: Path, middle: str) -> Iterator[StagedFile]:
    """A new file at ``path``, durable when the block ends well; else it is removed.

    Raises ``DiskFull`` or ``JobError`` in place of the system's errors.
    """
    make_folder(path.parent)
    try:
        sink = StagedFile(path, middle)
    except OSError as error:
        raise disk_error(error, "write", path) from error
    try:
        yield sink
        sink.finish()
    except BaseException as error:
        failed = sink._failed
        sink.abandon()
        cause = failed or error
        if isinstance(cause, OSError) and not isinstance(error, DiskFull):
            raise disk_error(cause, "write", path) from error
        raise


@contextmanager
def parquet_writer(sink: StagedFile, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A writer with the settings of every part; pages carry checksums."""
    writer = pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True)
    try:
        yield writer
    except BaseException:
        sink.give_up()
        with suppress(Exception):
            writer.close()
        raise
    writer.close()
