"""Which adapters sit in slots, which of them rows run on, and which may go: the least recently used first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container

from punica_batch_kernels.sgmv.slot_table import SlotTables

from punica_batch.engine.lora_types import LoadedLora
from punica_batch.models.lora import ModelLora


class LoraSlots:
    """The ``max_loras`` slots of a device. ``tables``: where its kernels look them up, kept up to date here.

    Eviction frees a slot at once: a step that is enqueued later finds there what was put there before it.
    """

    def __init__(self, model_lora: ModelLora, max_loras: int, tables: SlotTables | None) -> None:
        self.changes = 0  # of what could give room
        self._model_lora = model_lora
        self._tables = tables
        self._max_loras = max_loras
        self._free = list(range(max_loras - 1, -1, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._weights: dict[str, LoadedLora] = {}  # of _slots
        self._pins: Counter[str] = Counter()
        self._fresh: set[str] = set()  # of _slots, not pinned yet: the scheduler has not had a turn with them
        self._untried: set[str] = set()  # ... nor one that began with nothing running
        self._rows_run = False  # at the turn's beginning
        self._waited_for: Container[str | None] = ()

    def __contains__(self, lora_id: str) -> bool:
        return lora_id in self._slots

    def __getitem__(self, lora_id: str) -> int:
        return self._slots[lora_id]

    @property
    def lora_ids(self) -> list[str]:
        """The resident adapters, the least recently used first."""
        return list(self._slots)

    @property
    def all_pinned(self) -> bool:
        """Whether rows run on as many adapters as there are slots."""
        return len(self._pins) >= self._max_loras

    @property
    def in_use(self) -> bool:
        """Whether any row runs, those of the base model included."""
        return bool(self._pins) or self._rows_run

    def use(self, lora_id: str) -> bool:
        """Whether it is resident, and thereby its most recent use."""
        if lora_id not in self._slots:
            return False
        self._slots.move_to_end(lora_id)
        return True

    def pin(self, lora_id: str) -> None:
        assert lora_id in self._slots
        self._pins[lora_id] += 1
        self._fresh.discard(lora_id)
        self._untried.discard(lora_id)

    def unpin(self, lora_id: str) -> None:
        self._pins[lora_id] -= 1
        if not self._pins[lora_id]:
            del self._pins[lora_id]
            self.changes += 1

    def begin_turn(self, *, rows_run: bool, waited_for: Container[str | None]) -> None:
        """The scheduler had its turn with all that is resident, and has the next after this."""
        self._fresh.clear()
        if not self._rows_run:
            self._untried.clear()
        elif not rows_run:
            self.changes += 1
        self._rows_run, self._waited_for = rows_run, waited_for

    def spare(self) -> list[str]:
        """What no row runs on or waits for, the least recently used first."""
        needed = (self._pins, self._waited_for, self._fresh)
        return [i for i in self._slots if not any(i in each for each in needed)]

    def stalled(self) -> list[str]:
        """What rows only wait for, although nothing runs and the scheduler could have run them, the least recently
        used first. While anything runs they stay: adapters that exceed the room together would make way for each
        other, load after load."""
        if self.in_use:
            return []
        return [i for i in self._slots if i in self._waited_for and i not in self._untried]

    def fill(self, lora_id: str, loaded: LoadedLora) -> bool:
        """Puts an adapter into a free slot, else into that of the least recently used one that no row needs, else that
        nothing runs on; False if there is none. The scheduler asks for no more than there are slots: what it has just
        asked for has its own."""
        if not self._free:
            others = self.spare() or [i for i in self._slots if i not in self._pins and i not in self._fresh]
            if not others:
                return False
            self.evict(others[0])
        slot = self._free.pop()
        loaded.install(self._model_lora, slot, self._tables)
        self._slots[lora_id] = slot
        self._weights[lora_id] = loaded
        self._fresh.add(lora_id)
        self._untried.add(lora_id)
        self.changes += 1
        return True

    def evict(self, lora_id: str) -> None:
        """Takes an adapter that nothing runs on out of its slot, which is free then."""
        slot = self._slots.pop(lora_id)
        self._fresh.discard(lora_id)
        self._untried.discard(lora_id)
        loaded = self._weights.pop(lora_id)
        loaded.uninstall(self._model_lora, slot, self._tables)
        loaded.release(was_installed=True)
        self._free.append(slot)
        self.changes += 1

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls. For tests."""
        assert sorted([*self._slots.values(), *self._free]) == list(range(self._max_loras))
        assert set(self._pins) <= set(self._slots)
        assert set(self._weights) == set(self._slots)
        assert self._fresh | self._untried <= set(self._slots) - set(self._pins)
