"""What a folder's safetensors hold, from their headers alone: every check is made before a byte of a weight is read.

The format: a little-endian 64-bit length, a JSON header of that length, then the tensors' bytes, whose offsets the
header counts from its own end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from punica_batch.adapters.header import TensorInfo, header_entries
from punica_batch.errors import ModelError
from punica_batch.models.config import ModelConfig
from punica_batch.models.files import FileStamp, read_header, weight_files

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: ``nbytes`` bytes at ``offset`` of the file ``path``, row-major, little-endian. ``dtype``: one of
    ``ITEM_BYTES``. ``stamp``: of the file whose header said so."""

    name: str
    path: Path
    dtype: str
    shape: Shape
    offset: int
    nbytes: int
    stamp: FileStamp


def check_unchanged(tensor: StoredTensor, file: Path | int) -> None:
    """``file``: the tensor's, or its open descriptor. Raises ``ModelError`` when another has taken its place, or
    ``OSError``."""
    if FileStamp.of(file) != tensor.stamp:
        raise ModelError(f"{tensor.path} was changed while it was read: run again when nothing writes to it")


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
        header, stamp = read_header(path)
        entries = header_entries(header)
    except OSError as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as safetensors: it {error}") from error
    first = 8 + len(header)
    for name, info in entries.items():
        # Old checkpoints stored the rotary frequencies; a tied head is the embedding, whatever is stored.
        if name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
            continue
        _check(path, shapes, name, info)
        nbytes = info.end - info.begin
        if first + info.end > stamp.nbytes or nbytes != math.prod(info.shape) * ITEM_BYTES[info.dtype]:
            raise ModelError(f"{path} cannot be read as safetensors: tensor {name} is cut short")
        yield StoredTensor(name, path, info.dtype, info.shape, first + info.begin, nbytes, stamp)


def _check(path: Path, shapes: Mapping[str, Shape], name: str, info: TensorInfo) -> None:
    wanted = shapes.get(name)
    if wanted is None:
        raise ModelError(f"{path}: tensor {name} is not part of this architecture")
    if info.shape != wanted:
        raise ModelError(f"{path}: tensor {name} has shape {list(info.shape)}, config.json needs {list(wanted)}")
    if info.dtype not in ITEM_BYTES:
        raise ModelError(f"{path}: tensor {name} is {info.dtype[:20]}: quantised weights are not supported")
