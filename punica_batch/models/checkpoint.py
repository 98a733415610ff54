"""What a folder's safetensors hold, from their headers alone: every check is made before a byte of a weight is read.

The format: a little-endian 64-bit length, a JSON header of that length, then the tensors' bytes, whose offsets the
header counts from its own end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index, itemgetter
from pathlib import Path
from typing import Any

from punica_batch.errors import ModelError
from punica_batch.models.config import ModelConfig
from punica_batch.models.files import read_header, weight_files

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: ``nbytes`` bytes at ``offset`` of the file ``path``, row-major, little-endian. ``dtype``: one of
    ``ITEM_BYTES``."""

    name: str
    path: Path
    dtype: str
    shape: Shape
    offset: int
    nbytes: int


def stored_tensors(config: ModelConfig, folder: Path) -> list[StoredTensor]:
    """Where each of ``config.tensor_shapes()`` is, in the order of the files.

    Raises ``ModelError`` naming the file and tensor when one is missing, not the model's, of another shape, not
    floating point, there twice, or beyond its file's end.
    """
    shapes = config.tensor_shapes()
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        for tensor in _tensors_of(path, shapes, tied=config.tie_word_embeddings):
            if tensor.name in found:
                raise ModelError(f"{path}: tensor {tensor.name} is in the weights twice")
            found[tensor.name] = tensor
    missing = shapes.keys() - found.keys()
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing from the weights, first {min(missing)}")
    return list(found.values())


def _tensors_of(path: Path, shapes: Mapping[str, Shape], *, tied: bool) -> Iterator[StoredTensor]:
    """Of one file, by offset."""
    try:
        header, size = read_header(path)
        entries = dict(json.loads(header, object_pairs_hook=_unique))
        entries.pop("__metadata__", None)
        ranges = {name: tuple(map(index, entry["data_offsets"])) for name, entry in entries.items()}
        placed = [
            (begin, end, name, str(entries[name]["dtype"]), tuple(entries[name]["shape"]))
            for name, (begin, end) in sorted(ranges.items(), key=itemgetter(1))
        ]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {type(error).__name__}: {error}") from error
    first, expected = 8 + len(header), 0
    for begin, end, name, dtype, shape in placed:
        if begin != expected:
            raise ModelError(f"{path} cannot be read as safetensors: tensor {name} is not where the one before ends")
        expected = end
        # Old checkpoints stored the rotary frequencies; a tied head is the embedding, whatever is stored.
        if name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
            continue
        _check(path, shapes, name, dtype, shape)
        if end > size - first or end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ModelError(f"{path} cannot be read as safetensors: tensor {name} is cut short")
        yield StoredTensor(name, path, dtype, shape, first + begin, end - begin)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the header names something twice")
    return found


def _check(path: Path, shapes: Mapping[str, Shape], name: str, dtype: str, shape: Shape) -> None:
    wanted = shapes.get(name)
    if wanted is None:
        raise ModelError(f"{path}: tensor {name} is not part of this architecture")
    if shape != wanted:
        raise ModelError(f"{path}: tensor {name} has shape {list(shape)}, config.json needs {list(wanted)}")
    if dtype not in ITEM_BYTES:
        raise ModelError(f"{path}: tensor {name} is {dtype}: quantised weights are not supported")
