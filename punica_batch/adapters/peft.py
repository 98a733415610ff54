"""PEFT adapter folders: inspected by their config and header, and bound to the model's modules.

Apart from loading (``weights``), so that a job can check thousands of adapters before any work and load each when its
rows come up: ``inspect_adapter`` (config and header), then ``bind_adapter`` (every tensor finds its place).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from punica_batch.adapters.config import LoraConfig
from punica_batch.adapters.header import PREFIX_BYTES, TensorInfo, header_length, parse_header, shown
from punica_batch.adapters.store import FileStamp, Folder
from punica_batch.errors import AdapterError
from punica_batch.types import AdapterSpec

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"

_MAX_CONFIG_BYTES = 4 << 20
_FIRST_READ_BYTES = 128 << 10  # most adapters' whole header
_PREFIX = "base_model.model."
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<part>[AB])(?:\.default)?")
_BASE_COPY = re.compile(r"(?P<module>(?:.+\.)?(?:embed_tokens|lm_head))(?:\.base_layer)?\.weight")


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as its config and header describe it. ``nbytes`` is the weights file's size.

    ``max_rank`` is the largest rank among the file's tensors. The stamps and hashes pin what was inspected.
    """

    spec: AdapterSpec
    config: LoraConfig
    header: Mapping[str, TensorInfo] = field(repr=False)
    nbytes: int
    max_rank: int
    base_model_name: str | None
    config_sha256: str
    header_sha256: str
    header_bytes: int  # the 8 bytes of the length included: where the data begins
    weights_stamp: FileStamp
    storage_options: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def folder(self) -> Folder:
        return Folder(self.spec.path, self.storage_options)

    def error(self, sentence: str) -> AdapterError:
        return _error(self.spec, sentence)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """Where one module's A and B are in the file, and the scale that their product gets."""

    rank: int
    scale: float
    a_name: str
    b_name: str


def inspect_adapter(spec: AdapterSpec, storage_options: Mapping[str, Any] | None = None) -> AdapterFiles:
    """Reads the config and the weights' header, nothing more. Raises ``AdapterError`` or ``StoreAway``."""
    folder = Folder(spec.path, storage_options)
    config_bytes = read_config(spec, folder)
    try:
        config = LoraConfig.from_dict(_parse_config(config_bytes))
    except AdapterError as exc:
        raise _error(spec, f"{CONFIG_NAME}: {exc}") from exc
    stamp = weights_stamp(spec, folder)
    try:
        head = folder.read(WEIGHTS_NAME, 0, _FIRST_READ_BYTES)
        stop = PREFIX_BYTES + header_length(head, stamp.size)
        if stop > len(head):
            head += folder.read(WEIGHTS_NAME, len(head), stop)
        header = parse_header(head[PREFIX_BYTES:stop], stamp.size - stop)
    except AdapterError as exc:
        raise _error(spec, f"{WEIGHTS_NAME} {exc}") from exc
    return AdapterFiles(
        spec=spec,
        config=config,
        header=header,
        nbytes=stamp.size,
        max_rank=max((_rank(name, info) for name, info in header.items()), default=0),
        base_model_name=config.base_model_name_or_path,
        config_sha256=hashlib.sha256(config_bytes).hexdigest(),
        header_sha256=hashlib.sha256(head[:stop]).hexdigest(),
        header_bytes=stop,
        weights_stamp=stamp,
        storage_options=dict(storage_options or {}),
    )


def bind_adapter(files: AdapterFiles, modules: Mapping[str, tuple[int, int]]) -> dict[str, LoraModule]:
    """Every tensor of the file finds its place, and every targeted module its tensors, or ``AdapterError``.

    ``modules``: all linear and embedding layers of the model, name → (out, in).
    """
    targets = files.config.targets(modules)
    if not targets:
        raise files.error("its target_modules match no module of the model")
    found: dict[tuple[str, str], str] = {}
    for module in targets:
        for part in "AB":
            name = _tensor_name(module, part)
            if name in files.header:
                found[module, part] = name
    expected = set(found.values())
    for name in files.header:
        if name not in expected:
            _bind_rest(files, name, modules, targets, found)
    for module, (rank, _) in targets.items():
        out, inner = modules[module]
        for part, shape in (("A", (rank, inner)), ("B", (out, rank))):
            if (module, part) not in found:
                raise files.error(f"tensor {shown(_tensor_name(module, part))} is missing for a targeted module")
            _check_shape(files, found[module, part], shape, f"the model and {CONFIG_NAME} need")
    return {m: LoraModule(rank, scale, found[m, "A"], found[m, "B"]) for m, (rank, scale) in targets.items()}


def files_changed(spec: AdapterSpec) -> AdapterError:
    return _error(spec, "its files have changed since they were checked; run the job again")


def _error(spec: AdapterSpec, sentence: str) -> AdapterError:
    return AdapterError(f"adapter {spec.name!r} ({Folder(spec.path).shown()}): {sentence}")


def read_config(spec: AdapterSpec, folder: Folder) -> bytes:
    """The config's content. Raises ``AdapterError`` when there is none or it is too large."""
    found = folder.read_small(CONFIG_NAME, _MAX_CONFIG_BYTES)
    if found is None:
        raise _error(spec, f"there is no {CONFIG_NAME}")
    stamp, content = found
    if stamp.size > _MAX_CONFIG_BYTES:
        raise _error(spec, f"{CONFIG_NAME} has {stamp.size} bytes; at most {_MAX_CONFIG_BYTES} are read")
    return content


def _parse_config(content: bytes) -> Mapping[str, Any]:
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise AdapterError("not valid JSON") from exc
    if not isinstance(raw, dict):
        raise AdapterError("not a JSON object")
    return raw


def weights_stamp(spec: AdapterSpec, folder: Folder) -> FileStamp:
    """The weights file's. Raises ``AdapterError`` when there is none."""
    stamp = folder.stamp(WEIGHTS_NAME)
    if stamp is not None:
        return stamp
    if folder.stamp(PICKLE_NAME) is not None:
        raise _error(
            spec,
            f"{PICKLE_NAME} is a pickle, which can run code, and is never loaded; convert it, in that folder: "
            'python -c "import torch, safetensors.torch as s; '
            f"s.save_file({{k: v.clone() for k, v in torch.load('{PICKLE_NAME}', weights_only=True).items()}}, "
            f"'{WEIGHTS_NAME}')\"",
        )
    raise _error(spec, f"there is no {WEIGHTS_NAME}")


def _is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] == "embed_tokens"


def _rank(name: str, info: TensorInfo) -> int:
    is_a = ".lora_A." in name or ".lora_embedding_A" in name
    return info.shape[0] if is_a and info.shape else 0


def _tensor_name(module: str, part: str) -> str:
    return f"{_PREFIX}{module}." + (f"lora_embedding_{part}" if _is_embedding(module) else f"lora_{part}.weight")


def _bind_rest(
    files: AdapterFiles,
    name: str,
    modules: Mapping[str, tuple[int, int]],
    targets: Mapping[str, Any],
    found: dict[tuple[str, str], str],
) -> None:
    """A tensor without one of the expected names: one with the adapter's own name in it, a base copy, or an error."""
    module, part = _place(files, name, modules)
    if (module, part) in found:
        raise files.error(f"tensors {shown(found[module, part])} and {shown(name)} are for the same place")
    found[module, part] = name
    if part == "base":
        out, inner = modules[module]
        shape = (inner, out) if _is_embedding(module) else (out, inner)
        _check_shape(files, name, shape, "adapters with added tokens are not supported: the base model has")
    elif module not in targets:
        raise files.error(f"tensor {shown(name)} adapts a module that {CONFIG_NAME} does not target")


def _place(files: AdapterFiles, name: str, modules: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    """(module, 'A', 'B' or 'base') of a tensor."""
    short = name.removeprefix(_PREFIX)
    for pattern in (_LINEAR, _EMBEDDING, _BASE_COPY) if short != name else ():
        match = pattern.fullmatch(short)
        if match and match["module"] in modules:
            if pattern is _BASE_COPY:
                return match["module"], "base"
            if (pattern is _EMBEDDING) == _is_embedding(match["module"]):
                return match["module"], match["part"]
    raise files.error(f"tensor {shown(name)} finds no place in the model")


def _check_shape(files: AdapterFiles, name: str, wanted: tuple[int, int], why: str) -> None:
    if files.header[name].shape != wanted:
        raise files.error(f"tensor {shown(name)} has shape {files.header[name].shape}; {why} {wanted}")


def base_copies(files: AdapterFiles) -> dict[str, str]:
    """Whole base layers that PEFT saved beside the adapter's own tensors: module → tensor."""
    matches = ((name, _BASE_COPY.fullmatch(name, len(_PREFIX))) for name in files.header)
    return {match["module"]: name for name, match in matches if match}
