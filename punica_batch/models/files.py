"""A model folder's files: where it is, which weights it has, and its digest. No torch: the parent process uses it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from punica_batch.errors import ModelError
from punica_batch.urls import redact

# The format's own bound on its header; far above any real model's.
MAX_HEADER_BYTES = 100_000_000
SAMPLES, SAMPLE_BYTES = 16, 4096
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(name: str, revision: str | None = None, *, kind: str = "model") -> Path:
    """The local folder of ``name``: the folder itself, or the Hugging Face hub's snapshot of it, downloaded if need be.

    ``kind``: the flag that named it, ``model`` or ``tokenizer``.

    Raises ``ModelError`` when it is neither a folder nor a hub name that can be had.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise ModelError(
            f"{kind} folder {redact(name)} does not exist: give --{kind} a Hugging Face folder or a hub name"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the hub client raises many kinds: no network, no such name, gated, bad name
        raise ModelError(
            f"{kind} {redact(name)} is neither a folder nor could it be fetched from the hub (offline?): check the "
            "name, or download it first"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``ModelError`` when the file is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a Hugging Face model folder has one") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, by name. Raises ``ModelError`` when there are none (``.bin`` is never read)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelError(f"{index}: weight_map names {name!r}, which is no safetensors file of this folder")
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if not missing:
        return files
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has only .bin (pickle) weights, which are never loaded: convert to safetensors")
    raise ModelError(f"{folder}: weights file {missing[0]} is missing")


class FileStamp(NamedTuple):
    """Tells whether a path still has the contents that it had."""

    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileStamp:
        """``file``: a path or an open file's descriptor. Raises ``OSError``."""
        found = os.stat(file)
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


def read_header(path: Path) -> tuple[bytes, FileStamp]:
    """(the JSON header's bytes, the stamp of the file that has it). Raises ``ModelError`` when it is no safetensors
    file."""
    with path.open("rb") as file:
        stamp = FileStamp.of(file.fileno())
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, stamp.nbytes - 8):
            raise ModelError(f"{path} is not a safetensors file, or is cut short")
        return file.read(length), stamp


def stored_dtype(folder: Path) -> str | None:
    """The safetensors dtype name ("BF16") of the first floating-point tensor, None when there are no weights here."""
    try:
        header, _ = read_header(weight_files(folder)[0])
        entries = json.loads(header)
        names = [str(entry["dtype"]) for name, entry in entries.items() if name != "__metadata__"]
    except (ModelError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # reading it will say why
        return None
    return next((name for name in names if name.startswith(("F", "BF"))), None)


def model_digest(folder: str | Path) -> str:
    """SHA-256 (hex) of config.json, generation_config.json and, of each weights file, name, size, header and a sample.

    Reads at most 64 KiB of a file's tensors, spread evenly: enough to tell fine-tunes of one architecture apart,
    without reading weights whole.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for path in weight_files(folder):
        header, stamp = read_header(path)
        digest.update(f"{path.name} {stamp.nbytes} {len(header)}\n".encode() + header)
        first, room = 8 + len(header), max(stamp.nbytes - 8 - len(header) - SAMPLE_BYTES, 0)
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(first + room * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
