"""The weights of an inspected adapter: read and digested as numpy arrays, and their values checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from punica_batch.adapters.digest import DigestCache, combine, file_digest
from punica_batch.adapters.header import TensorInfo, shown
from punica_batch.adapters.peft import WEIGHTS_NAME, AdapterFiles, LoraModule, base_copies, files_changed, read_config
from punica_batch.errors import AdapterError
from punica_batch.types import AdapterSpec

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """One module's add-on: y += scale * (x A^T) B^T. ``a`` [rank, in], ``b`` [out, rank]; float32 or float16.

    For ``embed_tokens``: in = vocab_size, out = hidden_size, x one-hot.
    """

    a: Array
    b: Array
    scale: float


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter's contents. ``sha256`` is its digest, computed from the very bytes that ``modules`` view.

    ``base_layers``: copies of base weights that PEFT saves beside adapted embeddings, module → [vocab, hidden].
    PEFT would put them in the base model's place, so whoever has the base weights calls ``check_base_layers``.
    """

    name: str
    sha256: str
    modules: Mapping[str, LoraTensors] = field(repr=False)
    base_layers: Mapping[str, Array] = field(repr=False)


def load_adapter(
    files: AdapterFiles, bound: Mapping[str, LoraModule], cache: DigestCache | None = None
) -> LoadedAdapter:
    """Reads the weights in one sequential pass. The digest comes from the same bytes, and goes into ``cache``.

    F32 and F16 are delivered as they are (views of one buffer), BF16 as float32. Raises ``AdapterError`` when the
    files are no longer those inspected or a value is NaN or Inf, and ``StoreAway``.
    """
    folder = files.folder
    buffer = np.empty(files.nbytes, np.uint8)
    view, digest = buffer.data, blake3()
    count = folder.stream(WEIGHTS_NAME, files.nbytes, lambda at, length: view[at : at + length], digest.update)
    head = hashlib.sha256(view[: files.header_bytes]).hexdigest()
    if (
        count != files.nbytes
        or head != files.header_sha256
        or folder.stamp(WEIGHTS_NAME) != files.weights_stamp
        or hashlib.sha256(read_config(files.spec, folder)).hexdigest() != files.config_sha256
    ):
        raise files_changed(files.spec)
    weights_blake3 = digest.hexdigest()
    if cache is not None:
        cache.put(folder.identity(WEIGHTS_NAME), files.weights_stamp, weights_blake3)
    data = buffer[files.header_bytes :]
    copies = base_copies(files)
    modules = {
        module: LoraTensors(_finite(files, data, m.a_name), _finite(files, data, m.b_name), m.scale)
        for module, m in bound.items()
    }
    if copies:  # views would keep the copies' bytes, often many times the adapter's, alive
        modules = {module: LoraTensors(t.a.copy(), t.b.copy(), t.scale) for module, t in modules.items()}
    base_layers = {module: _decode(data, files.header[name]) for module, name in copies.items()}
    return LoadedAdapter(files.spec.name, combine(files.config_sha256, weights_blake3), modules, base_layers)


def check_base_layers(adapter: LoadedAdapter, base_weight: Callable[[str], Array], *, rtol: float = 0.0) -> None:
    """Raises ``AdapterError`` if a saved copy of a base weight is not the base weight.

    ``base_weight(module)``: [vocab, hidden] as numpy. ``rtol``: rounding between the two dtypes (2**-8 for bfloat16,
    2**-11 for float16, 0 where both are the same).
    """
    for module, copy in adapter.base_layers.items():
        base = base_weight(module)
        if copy.shape != base.shape or not np.allclose(copy, base, rtol=rtol, atol=rtol * 1e-3):
            raise AdapterError(
                f"adapter {adapter.name!r}: its own copy of {shown(module)} differs from the base model's; adapters "
                "that replace base weights are not supported"
            )


def adapter_digest(files: AdapterFiles, cache: DigestCache | None = None) -> str:
    """The adapter's digest, as ``combine`` makes it; reads the weights unless ``cache`` knows them."""
    weights = file_digest(files.folder, WEIGHTS_NAME, files.weights_stamp, cache)
    if weights is None:
        raise files_changed(files.spec)
    return combine(files.config_sha256, weights)


def check_finite(
    files: AdapterFiles, bound: Mapping[str, LoraModule], data: NDArray[np.uint8], spec: AdapterSpec
) -> None:
    """Raises ``AdapterError`` naming a tensor that holds NaN or Inf. ``data``: that of ``spec``'s weights file, without
    its header, which is the same as that of ``files``."""
    files = replace(files, spec=spec)
    for module in bound.values():
        for name in (module.a_name, module.b_name):
            _finite(files, data, name)


def _finite(files: AdapterFiles, data: NDArray[np.uint8], name: str) -> Array:
    array = _decode(data, files.header[name])
    if not np.isfinite(array).all():
        raise files.error(f"tensor {shown(name)} holds NaN or Inf")
    return array


def _decode(data: NDArray[np.uint8], info: TensorInfo) -> Array:
    raw = data[info.begin : info.end]
    if info.dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    array = raw.view("<f4" if info.dtype == "F32" else "<f2").reshape(info.shape)
    return np.require(array, requirements="A")
