"""An adapter's files as bytes, for whoever takes the tensors out of them elsewhere: on a device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from punica_batch.adapters.digest import DigestCache, combine
from punica_batch.adapters.header import PREFIX_BYTES
from punica_batch.adapters.peft import WEIGHTS_NAME, files_changed, read_config, weights_stamp
from punica_batch.adapters.store import FileStamp, Folder
from punica_batch.types import AdapterSpec


@dataclass(frozen=True, slots=True)
class RawAdapter:
    """A weights file that is about to be read, and the config that belongs to it."""

    spec: AdapterSpec
    config_sha256: str
    stamp: FileStamp
    storage_options: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, spec: AdapterSpec, storage_options: Mapping[str, Any]) -> RawAdapter:
        """Reads the config. Raises ``AdapterError`` or ``StoreAway``."""
        folder = Folder(spec.path, storage_options)
        config = read_config(spec, folder)
        return cls(spec, hashlib.sha256(config).hexdigest(), weights_stamp(spec, folder), storage_options)

    @property
    def nbytes(self) -> int:
        return self.stamp.size

    @property
    def folder(self) -> Folder:
        return Folder(self.spec.path, self.storage_options)

    def read(self, memory: memoryview) -> FileStamp:
        """Fills ``memory``, ``nbytes`` long; the file's stamp afterwards. Raises ``AdapterError`` when the file has
        changed meanwhile."""
        count, after = self.folder.read_into(WEIGHTS_NAME, memory)
        if count != self.nbytes or after is None or after != self.stamp:
            raise files_changed(self.spec)
        return after

    def sha256(self, memory: memoryview, after: FileStamp, digests: DigestCache | None) -> str:
        """The adapter's digest, of the bytes that were read, ``after`` which the file had that stamp; ``digests`` may
        know it, and learn it."""
        if digests is None or after.changed_ns != self.stamp.changed_ns:
            return combine(self.config_sha256, blake3(memory).hexdigest())
        identity = self.folder.identity(WEIGHTS_NAME)
        weights = digests.get(identity, after)
        if weights is None:
            weights = blake3(memory).hexdigest()
            digests.put(identity, after, weights)
        return combine(self.config_sha256, weights)


def header_sha256(memory: memoryview) -> str:
    """The digest of a safetensors header, its length included; of whatever is there if it is no such file."""
    length = int.from_bytes(memory[:PREFIX_BYTES], "little")
    return hashlib.sha256(memory[: PREFIX_BYTES + length]).hexdigest()
