"""One segment file of the journal: checksummed frames, appended one after the other.

A frame is a 64-byte header (magic, payload length, CRC-32 of the payload, CRC-32 of the header before it) and the
payload, an Arrow IPC record batch padded to 64 bytes. A frame counts only when both checksums agree, so a torn or
rotten one is simply not there; after one with a bad header, reading goes on at the next place that has a good one.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.disk import disk_error, disk_errors, fsync_folder, write_all
from punica_batch.errors import JobError

MAGIC = b"\x89PBJNL1\n"
HEADER_BYTES = 64
_FIELDS = struct.Struct("<8sQI")  # magic, payload bytes, payload crc
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a payload lies in its segment file, and its checksum."""

    offset: int
    length: int
    crc: int


class SegmentWriter:
    """Appends frames to a new file. A frame that cannot be written whole is cut off again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        with disk_errors("create", path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fsync_folder(path.parent)

    def append(self, payload: memoryview) -> Frame:
        """Raises ``DiskFull`` or ``JobError``; the file then ends where it did before."""
        padding = -len(payload) % 64
        frame = Frame(self.size + HEADER_BYTES, len(payload), zlib.crc32(payload))
        crashpoint("journal.write.before")
        try:
            write_all(self._descriptor, _header(frame))
            crashpoint("journal.write.middle")
            write_all(self._descriptor, payload)
            write_all(self._descriptor, bytes(padding))
        except OSError as error:
            os.ftruncate(self._descriptor, self.size)
            os.lseek(self._descriptor, self.size, os.SEEK_SET)
            raise disk_error(error, "write", self.path) from error
        crashpoint("journal.write.after")
        self.size += HEADER_BYTES + len(payload) + padding
        return frame

    def fsync(self) -> None:
        crashpoint("journal.fsync.before")
        with disk_errors("write", self.path):
            os.fsync(self._descriptor)
        crashpoint("journal.fsync.after")

    def close(self) -> None:
        os.close(self._descriptor)


def _header(frame: Frame) -> bytes:
    fields = _FIELDS.pack(MAGIC, frame.length, frame.crc)
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def read_payload(path: Path, frame: Frame) -> bytes:
    """Raises ``JobError`` when the disk no longer gives back what was written."""
    with disk_errors("read", path), open(path, "rb") as file:
        file.seek(frame.offset)
        payload = file.read(frame.length)
    if len(payload) != frame.length or zlib.crc32(payload) != frame.crc:
        raise JobError(f"{path} has changed on the disk since it was read: run the same command again")
    return payload


def recover_frames(path: Path, *, repair: bool = True) -> Iterator[tuple[Frame, bytes]]:
    """The good frames of ``path`` in order; ``repair`` cuts off what follows the last one."""
    size = path.stat().st_size
    end = 0
    if size:
        with (
            disk_errors("read", path),
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            position = 0
            while (frame := _frame_at(data, position)) is not None:
                payload = data[frame.offset : frame.offset + frame.length]
                position = frame.offset + frame.length + -frame.length % 64
                if zlib.crc32(payload) == frame.crc:
                    end = position
                    yield frame, payload
    if repair and end < size:
        with disk_errors("repair", path):
            os.truncate(path, end)


def _frame_at(data: mmap.mmap, position: int) -> Frame | None:
    """The first frame at or after ``position`` whose header is good and whose payload ends within the file."""
    while (position := data.find(MAGIC, position)) >= 0:
        fields = data[position : position + _FIELDS.size]
        crc = data[position + _FIELDS.size : position + _FIELDS.size + _CRC.size]
        if len(crc) == _CRC.size and _CRC.unpack(crc)[0] == zlib.crc32(fields):
            _, length, payload_crc = _FIELDS.unpack(fields)
            frame = Frame(position + HEADER_BYTES, length, payload_crc)
            if frame.offset + frame.length <= len(data):
                return frame
        position += 1
    return None
