"""What loading an adapter yields, what it counts, and what its rows fail of when it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from punica_batch_kernels.sgmv.slot_table import SlotTables

from punica_batch.errors import AdapterError, RowError
from punica_batch.models.lora import ModelLora


class LoadedLora(Protocol):
    """A loaded adapter: ``PackedAdapter`` or ``DeviceAdapter``."""

    @property
    def sha256(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def bytes_copied(self) -> int: ...

    def install(self, model_lora: ModelLora, slot: int, tables: SlotTables | None) -> None: ...

    def uninstall(self, model_lora: ModelLora, slot: int, tables: SlotTables | None) -> None: ...

    def release(self, *, was_installed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadStats:
    """Adapters loaded so far, used or not, each load counted; bytes of their files copied to the device (0 where there
    is none); seconds that loads took, added up over threads that load side by side."""

    adapters: int = 0
    bytes_copied: int = 0
    seconds: float = 0.0


def row_error(lora_id: str, error: BaseException) -> RowError:
    """What the rows of an adapter that cannot be loaded end with."""
    if isinstance(error, RowError):
        return error
    if isinstance(error, AdapterError):
        return RowError("adapter_unreadable", str(error))
    # A fault that nobody foresaw, in this one adapter: its rows fail, the engine goes on.
    return RowError("adapter_unreadable", f"adapter {lora_id!r} cannot be loaded ({type(error).__name__})")
