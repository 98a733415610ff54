"""Weights from files straight to a GPU: threads read pieces into pinned buffers, which are copied while others fill.

A read from the page cache is a copy by one core, several times slower than the link; so several threads read, and the
buffers are small, as pinning memory costs about as much as filling it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from punica_batch.errors import ModelError
from punica_batch.models.checkpoint import ITEM_BYTES, StoredTensor, check_unchanged

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
THREADS = 8
PIECE_BYTES = 8 << 20
BUFFERS = 2  # of each thread: one is copied while the other fills


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` elements of a tensor from element ``start`` on."""

    tensor: StoredTensor
    start: int
    count: int

    @property
    def offset(self) -> int:
        return self.tensor.offset + self.start * ITEM_BYTES[self.tensor.dtype]


def pieces(tensors: Sequence[StoredTensor], nbytes: int) -> Iterator[Piece]:
    """All elements of all tensors once, in order, in pieces of at most ``nbytes``."""
    for tensor in tensors:
        item = ITEM_BYTES[tensor.dtype]
        total, step = tensor.nbytes // item, nbytes // item
        for start in range(0, total, step):
            yield Piece(tensor, start, min(step, total - start))


def stream_weights(
    tensors: Sequence[StoredTensor],
    places: Mapping[str, Tensor],
    device: torch.device,
    *,
    threads: int = THREADS,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Fills ``places`` (contiguous, on ``device``, any floating dtype), by name, and returns when that is done.

    Raises ``ModelError`` when a file is not the one whose header was read, or cannot be read to the end of a tensor.
    """
    work = _Shared(pieces(tensors, piece_bytes))
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    pinned = torch.empty(threads, BUFFERS, piece_bytes, dtype=torch.uint8, pin_memory=True)
    with ExitStack() as stack:
        descriptors = open_files(tensors, stack)
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="weights"))
        readers = [_Reader(buffers, stream, places, descriptors) for buffers in pinned]
        runs = [pool.submit(reader.run, work) for reader in readers]
        done, _ = wait(runs, return_when=FIRST_EXCEPTION)
        work.stop()
        for run in done:
            run.result()
    stream.synchronize()


def open_files(tensors: Sequence[StoredTensor], stack: ExitStack) -> dict[Path, int]:
    """Descriptors by path, closed with ``stack``. Raises ``ModelError`` for a file that is not the one whose header was
    read: the tensors' places in it are not known."""
    descriptors = {}
    for tensor in {tensor.path: tensor for tensor in tensors}.values():
        try:
            descriptors[tensor.path] = stack.enter_context(tensor.path.open("rb", buffering=0)).fileno()
            check_unchanged(tensor, descriptors[tensor.path])
        except OSError as error:
            raise ModelError(f"{tensor.path} cannot be read as safetensors: {error}") from error
    return descriptors


class _Shared:
    """An iterator that several threads take from."""

    def __init__(self, items: Iterator[Piece]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def take(self) -> Piece | None:
        with self._lock:
            return None if self._stopped else next(self._items, None)


class _Reader:
    """One thread's buffers. ``buffers``: pinned bytes [BUFFERS, PIECE_BYTES]."""

    def __init__(
        self, buffers: Tensor, stream: torch.cuda.Stream, places: Mapping[str, Tensor], files: Mapping[Path, int]
    ) -> None:
        self._stream, self._places, self._files = stream, places, files
        self._buffers = list(buffers)
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]

    def run(self, work: _Shared) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            turn = 0
            while (piece := work.take()) is not None:
                buffer, copied = self._buffers[turn], self._copied[turn]
                copied.synchronize()
                self._place(piece, buffer)
                copied.record(self._stream)
                turn = (turn + 1) % len(self._buffers)

    def _place(self, piece: Piece, buffer: Tensor) -> None:
        dtype = TORCH_DTYPES[piece.tensor.dtype]
        source = buffer[: piece.count * dtype.itemsize]
        read_into(self._files[piece.tensor.path], piece.tensor, piece.offset, source.numpy().data)
        place = self._places[piece.tensor.name].view(-1)[piece.start : piece.start + piece.count]
        values = source.view(dtype)
        if dtype != place.dtype:  # converted on the device: what is staged there is the stream's own memory
            values = values.to(place.device, non_blocking=True)
        place.copy_(values, non_blocking=True)


def read_into(descriptor: int, tensor: StoredTensor, offset: int, view: memoryview) -> None:
    """Fills ``view`` from a file's bytes at ``offset``. Raises ``ModelError`` when there are not that many."""
    while view:
        try:
            count = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise ModelError(f"{tensor.path} cannot be read as safetensors: {error}") from error
        if count == 0:
            raise ModelError(f"{tensor.path} cannot be read as safetensors: tensor {tensor.name} is cut short")
        view, offset = view[count:], offset + count
