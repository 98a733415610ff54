"""The header of a safetensors file, read with bounds before anything trusts it.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes JSON
``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, then the data; tensors tile the data without a gap.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from punica_batch.errors import AdapterError

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_DIMENSION = 1 << 40
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``dtype`` by the format's name (an adapter's: F32, F16 or BF16); bytes [begin, end) counted from the
    start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_length(prefix: bytes, file_bytes: int) -> int:
    """The header's length from the file's first 8 bytes. Raises ``AdapterError`` when it cannot be right."""
    if len(prefix) < PREFIX_BYTES:
        raise AdapterError(f"is no safetensors file: it has {len(prefix)} bytes")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if PREFIX_BYTES + length > file_bytes:
        raise AdapterError(f"is cut short: its header needs {length} bytes and the file has {file_bytes}")
    return length


def parse_header(header: bytes, data_bytes: int) -> dict[str, TensorInfo]:
    """Tensors by name, in the data's order. Raises ``AdapterError`` unless they tile ``data_bytes`` exactly."""
    try:
        tensors = header_entries(header)
    except ValueError as exc:
        raise AdapterError(str(exc)) from exc
    if len(tensors) > MAX_TENSORS:
        raise AdapterError(f"has {len(tensors)} tensors; an adapter has at most {MAX_TENSORS}")
    position = 0
    for name, info in tensors.items():
        _check(name, info)
        position = info.end
    if position != data_bytes:
        raise AdapterError(f"holds {data_bytes} bytes of data and its tensors need {position}: cut short or damaged")
    return tensors


def header_entries(header: bytes) -> dict[str, TensorInfo]:
    """Tensors of any dtype by name, in the data's order, which they tile from its beginning on; their sizes are not
    compared with their shapes. Raises ``ValueError``: what the file does wrong, as the rest of a sentence."""
    try:
        raw = json.loads(header, object_pairs_hook=_unique)
    except _RepeatedName as exc:
        raise ValueError("has a header that names something twice") from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError("has a header that is not valid JSON") from exc
    if not isinstance(raw, dict):
        raise ValueError("has a header that is not a JSON object")
    raw.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry) for name, entry in raw.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = 0
    for name, info in ordered.items():
        if info.begin != position:
            raise ValueError(f"places tensor {shown(name)} at byte {info.begin} instead of {position}")
        position = info.end
    return ordered


def shown(name: str) -> str:
    """A tensor's or module's name as a message shows it: quoted, bounded."""
    return repr(name if len(name) <= 120 else name[:117] + "...")


class _RepeatedName(ValueError):
    """A JSON object has a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RepeatedName
    return found


def _tensor(name: str, entry: Any) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as exc:
        raise ValueError(f"describes tensor {shown(name)} wrongly") from exc
    sizes = (*shape, begin, end)
    if len(shape) > 8 or not all(type(n) is int and 0 <= n <= MAX_DIMENSION for n in sizes) or begin > end:
        raise ValueError(f"describes tensor {shown(name)} wrongly: shape or offsets are not sizes")
    return TensorInfo(str(dtype), shape, begin, end)


def _check(name: str, info: TensorInfo) -> None:
    if info.dtype not in ITEM_BYTES:
        raise AdapterError(f"stores tensor {shown(name)} as {info.dtype[:20]}; only F32, F16 and BF16 are supported")
    nbytes = info.end - info.begin
    if nbytes != math.prod(info.shape) * ITEM_BYTES[info.dtype]:
        raise AdapterError(f"gives tensor {shown(name)} {nbytes} bytes, which its shape and dtype do not need")
