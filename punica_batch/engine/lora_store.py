"""Adapters on the device: bounded slots, read-ahead on threads, the least recently used out first.

An adapter's way: planned (``prefetch``) → loading on a thread → staged in host memory → in a slot (``poll``), where
rows pin it. All but the loading itself happens on the caller's thread, which asks for readiness and never waits.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from punica_batch_kernels.native.openmp import use_one_thread
from punica_batch_kernels.sgmv.slot_table import SlotTables

from punica_batch.engine.lora_pack import PackedAdapter, clear, install
from punica_batch.errors import AdapterError, Interrupted, RowError
from punica_batch.models.lora import ModelLora

_THREADS = 2


class LoraStore:
    """The scheduler's ``AdapterSlots``, and the weights behind them.

    ``load(lora_id)`` runs on threads: it answers the packed adapter, or raises ``AdapterError`` or ``RowError`` (that
    adapter's rows fail) or ``Interrupted`` (nobody's rows: ``poll`` raises it). At most ``read_ahead`` adapters that
    no one has asked for yet are loading or staged. Eviction frees a slot at once: steps run one after the other.
    ``tables``: where the device kernels look the slots up, kept up to date here.
    """

    def __init__(
        self,
        model_lora: ModelLora,
        load: Callable[[str], PackedAdapter],
        *,
        max_loras: int,
        read_ahead: int = 4,
        tables: SlotTables | None = None,
    ) -> None:
        self.model_lora = model_lora
        self._tables = tables
        self.failures: dict[str, RowError] = {}
        self._load = load
        self._max_loras = max_loras
        self._read_ahead = read_ahead
        self._free = list(range(max_loras - 1, -1, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()  # resident, least recently used first
        self._pins: Counter[str] = Counter()
        self._planned: dict[str, None] = {}  # to be read ahead, in order
        self._loads: dict[str, Future[PackedAdapter]] = {}  # started, not yet in a slot, oldest first
        self._requested: dict[str, None] = {}  # of _loads: those that go into a slot as soon as they can
        self._sha256: dict[str, str] = {}
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="lora-load", initializer=use_one_thread)

    # -- the scheduler's questions (AdapterSlots) --

    def ready(self, lora_id: str) -> bool:
        if lora_id not in self._slots:
            return False
        self._slots.move_to_end(lora_id)
        return True

    def request(self, lora_id: str) -> None:
        if lora_id in self._slots or lora_id in self.failures or len(self._pins) >= self._max_loras:
            return
        self._planned.pop(lora_id, None)
        if lora_id not in self._loads:
            self._make_room()
            self._start(lora_id)
        self._requested[lora_id] = None

    def pin(self, lora_id: str) -> None:
        assert lora_id in self._slots
        self._pins[lora_id] += 1

    def unpin(self, lora_id: str) -> None:
        self._pins[lora_id] -= 1
        if not self._pins[lora_id]:
            del self._pins[lora_id]

    # -- the engine's --

    def slot(self, lora_id: str) -> int:
        """Where a resident adapter's weights are."""
        return self._slots[lora_id]

    def sha256(self, lora_id: str | None) -> str | None:
        """The digest of an adapter that has been resident."""
        return None if lora_id is None else self._sha256.get(lora_id)

    @property
    def num_resident(self) -> int:
        return len(self._slots)

    def prefetch(self, lora_ids: Iterable[str]) -> None:
        """Adapters that rows will need, in the order in which they will; read ahead as far as ``read_ahead`` allows."""
        for lora_id in lora_ids:
            if not (lora_id in self._slots or lora_id in self._loads or lora_id in self.failures):
                self._planned[lora_id] = None
        self._start_planned()

    def poll(self) -> list[str]:
        """Puts what was asked for and has been loaded into slots. Answers the adapters found unusable since the last
        call, which are now in ``failures``. Raises ``Interrupted`` (``StoreAway``) when a store cannot be reached."""
        failed = [lora_id for lora_id, load in self._loads.items() if load.done() and self._has_failed(lora_id, load)]
        for lora_id in failed:
            self._forget(lora_id)
        for lora_id in list(self._requested):
            if self._loads[lora_id].done() and (slot := self._take_slot()) is not None:
                packed = self._loads[lora_id].result()
                self._forget(lora_id)
                self._put(slot, packed)
                self._slots[lora_id] = slot
                self._sha256[lora_id] = packed.sha256
        self._start_planned()
        return failed

    def wait(self, timeout: float) -> None:
        """Returns when an adapter that was asked for has been loaded, or after ``timeout`` seconds."""
        requested = [self._loads[lora_id] for lora_id in self._requested]
        if requested:
            wait(requested, timeout, return_when=FIRST_COMPLETED)
        else:
            time.sleep(timeout)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls. For tests."""
        slots = [*self._slots.values(), *self._free]
        assert sorted(slots) == list(range(self._max_loras))
        assert set(self._pins) <= set(self._slots)
        assert set(self._requested) <= set(self._loads)
        assert not set(self._loads) & set(self._slots)
        assert not (set(self._planned) | set(self._loads) | set(self._slots)) & set(self.failures)

    # -- private --

    def _start(self, lora_id: str) -> None:
        self._loads[lora_id] = self._executor.submit(self._load, lora_id)

    def _start_planned(self) -> None:
        while self._planned and len(self._loads) - len(self._requested) < self._read_ahead:
            lora_id = next(iter(self._planned))
            del self._planned[lora_id]
            if lora_id not in self._slots and lora_id not in self._loads and lora_id not in self.failures:
                self._start(lora_id)

    def _make_room(self) -> None:
        """Something else than what was read ahead is needed: what waits longest was read for rows that are gone."""
        staged = [i for i, load in self._loads.items() if i not in self._requested and load.done()]
        if staged and len(staged) >= self._read_ahead:
            del self._loads[staged[0]]

    def _forget(self, lora_id: str) -> None:
        del self._loads[lora_id]
        self._requested.pop(lora_id, None)

    def _take_slot(self) -> int | None:
        """A free slot, else that of the least recently used adapter that nothing runs on."""
        if self._free:
            return self._free.pop()
        for lora_id, slot in self._slots.items():
            if lora_id not in self._pins:
                del self._slots[lora_id]
                self._put(slot, None)
                return slot
        return None

    def _put(self, slot: int, packed: PackedAdapter | None) -> None:
        """Fills a slot, or empties it."""
        if packed is None:
            clear(self.model_lora, slot)
        else:
            install(self.model_lora, slot, packed)
        if self._tables is not None:
            self._tables.install(slot)

    def _has_failed(self, lora_id: str, load: Future[PackedAdapter]) -> bool:
        error = load.exception()
        if error is None:
            known = self._sha256.get(lora_id)
            if known is None or load.result().sha256 == known:
                return False
            error = AdapterError(f"adapter {lora_id!r}: its files have changed since its first rows ran")
        if isinstance(error, Interrupted):
            raise error
        self.failures[lora_id] = _row_error(lora_id, error)
        return True


def _row_error(lora_id: str, error: BaseException) -> RowError:
    if isinstance(error, RowError):
        return error
    if isinstance(error, AdapterError):
        return RowError("adapter_unreadable", str(error))
    # A fault that nobody foresaw, in this one adapter: its rows fail, the engine goes on.
    return RowError("adapter_unreadable", f"adapter {lora_id!r} cannot be loaded ({type(error).__name__})")
