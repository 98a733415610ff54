"""Adapters on the device: bounded slots and bytes, read-ahead on threads.

An adapter's way: planned (``prefetch``) → loading on a thread → staged, its weights in place but in no slot → in a slot
(``poll``), where rows pin it. All but the loading itself happens on the caller's thread, which asks for readiness and
never waits. What it enqueues for the device (a slot's row in the tables) goes to its current stream, which has to be
the one that the steps run on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable

import torch
from punica_batch_kernels.sgmv.slot_table import SlotTables

from punica_batch.engine.device_errors import is_device_error
from punica_batch.engine.lora_arena import Arena, NoRoom
from punica_batch.engine.lora_loads import Loads
from punica_batch.engine.lora_slots import LoraSlots
from punica_batch.engine.lora_types import LoadedLora, LoadStats, row_error
from punica_batch.errors import AdapterError, Interrupted, RowError
from punica_batch.models.lora import ModelLora

_TRIES = 3  # of a load for which the device's memory does not suffice outside of the arena


class LoraStore:
    """The scheduler's ``AdapterSlots``, and the weights behind them.

    ``load(lora_id)`` runs on ``num_threads`` threads: it answers the loaded adapter, or raises ``AdapterError`` or
    ``RowError`` (that adapter's rows fail), ``NoRoom`` (tried again once others have gone) or ``Interrupted`` (nobody's
    rows: ``poll`` raises it). At most ``read_ahead`` adapters that no one has asked for yet are loading or staged.

    ``tables``: of ``LoraSlots``. ``arena``: bytes that ``load`` takes from, under the adapter's name; adapters that no
    row needs go, the least recently used first, when a load needs room there.
    """

    def __init__(
        self,
        model_lora: ModelLora,
        load: Callable[[str], LoadedLora],
        *,
        max_loras: int,
        read_ahead: int = 4,
        num_threads: int = 2,
        tables: SlotTables | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.model_lora = model_lora
        self.failures: dict[str, RowError] = {}
        self._newly_failed: list[str] = []  # not told of yet
        self._slots = LoraSlots(model_lora, max_loras, tables)
        self._arena = arena
        self._read_ahead = read_ahead
        self._planned: dict[str, None] = {}  # to be read ahead, in order
        self._loads = Loads(load, num_threads)
        self._loaded: dict[str, LoadedLora] = {}  # in no slot yet, oldest first
        self._requested: dict[str, None] = {}  # go into a slot as soon as they can; started where there was room
        self._sha256: dict[str, str] = {}
        self._nbytes: dict[str, int] = {}  # of what has been loaded
        self._usual_nbytes = 0  # expected of others: as the last one
        self._short_of_memory = Counter[str]()
        self._cramped: set[str] = set()  # of _requested: found no room in one piece, and have not been loaded since
        self._changes = 0  # of what could give room, beside the slots'
        self._held_up = False  # an asked-for adapter found no room in this turn: nor do those after it
        # by whether rows wait for what was to be loaded: the ``_state`` in which there was none
        self._stuck_at: dict[bool, tuple[int, int, int]] = {}

    # -- the scheduler's questions (AdapterSlots) --

    def ready(self, lora_id: str) -> bool:
        return self._slots.use(lora_id)

    def request(self, lora_id: str) -> None:
        if lora_id in self._slots or lora_id in self.failures or self._slots.all_pinned:
            return
        self._planned.pop(lora_id, None)
        self._requested[lora_id] = None
        if not self._is_started(lora_id):
            self._make_room()
            if not self._held_up:
                self._start_requested()

    def pin(self, lora_id: str) -> None:
        self._slots.pin(lora_id)

    def unpin(self, lora_id: str) -> None:
        self._slots.unpin(lora_id)

    # -- the engine's --

    def slot(self, lora_id: str) -> int:
        """Where a resident adapter's weights are."""
        return self._slots[lora_id]

    def sha256(self, lora_id: str | None) -> str | None:
        """The digest of an adapter that has been resident."""
        return None if lora_id is None else self._sha256.get(lora_id)

    @property
    def resident(self) -> list[str]:
        """The adapters in slots, the least recently used first."""
        return self._slots.lora_ids

    @property
    def bytes_copied(self) -> int:
        """Of adapters' files, to the device, so far."""
        return self.stats.bytes_copied

    @property
    def stats(self) -> LoadStats:
        return self._loads.stats

    def prefetch(self, lora_ids: Iterable[str]) -> None:
        """Adapters that rows will need, in the order in which they will; read ahead as far as ``read_ahead`` allows."""
        for lora_id in lora_ids:
            if not self._is_known(lora_id):
                self._planned[lora_id] = None
        self._start_planned()

    def poll(self, *, rows_run: bool = False, waited_for: Container[str | None] = ()) -> list[str]:
        """Once before each turn of the scheduler: puts what was asked for and has been loaded into slots.
        ``rows_run``: whether any row does, those of the base model included; ``waited_for``: adapters that rows wait
        for, as they are at any time until the next call. Answers the adapters found unusable since the last call, which
        are now in ``failures``. Raises ``Interrupted`` (``StoreAway``) when a store cannot be reached."""
        self._slots.begin_turn(rows_run=rows_run, waited_for=waited_for)
        while (ended := self._loads.take()) is not None:
            lora_id, outcome = ended
            self._changes += 1
            if isinstance(outcome, NoRoom):
                self._try_again(lora_id, outcome.nbytes)
            elif isinstance(outcome, torch.OutOfMemoryError) and self._short_of_memory[lora_id] < _TRIES:
                self._short_of_memory[lora_id] += 1  # a load's passing need, such as a larger buffer
                self._try_again(lora_id, self._nbytes.get(lora_id, self._usual_nbytes))
            elif (error := self._error(lora_id, outcome)) is not None:
                self._fail(lora_id, error)
        for lora_id in [i for i in self._requested if i in self._loaded]:
            if not self._slots.fill(lora_id, self._loaded[lora_id]):
                break
            self._sha256[lora_id] = self._loaded.pop(lora_id).sha256
            del self._requested[lora_id]
        self._start_requested()
        self._start_planned()
        failed, self._newly_failed = self._newly_failed, []
        return failed

    def wait(self, timeout: float) -> None:
        """Returns when a load has ended, or after ``timeout`` seconds."""
        self._loads.wait(timeout)

    def close(self) -> None:
        self._loads.close()

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls. For tests."""
        self._slots.check_integrity()
        resident = set(self.resident)
        assert not set(self._requested) & resident
        started = self._loads.under_way | set(self._loaded)
        assert len(started) == len(self._loads) + len(self._loaded)
        assert not started & resident
        assert not (set(self._planned) | started | resident) & set(self.failures)

    # -- private --

    def _is_started(self, lora_id: str) -> bool:
        return lora_id in self._loads or lora_id in self._loaded

    def _is_known(self, lora_id: str) -> bool:
        """Whether it need not be planned."""
        where = (self._slots, self._requested, self._loads, self._loaded, self.failures)
        return any(lora_id in each for each in where)

    def _start(self, lora_id: str) -> bool:
        """Begins a load if the device has room for it, or can have."""
        if not self._has_room(lora_id):
            return False
        self._loads.start(lora_id)
        return True

    def _start_requested(self) -> None:
        """In order: a small adapter does not overtake a large one that waits for room."""
        self._held_up = False
        for lora_id in self._requested:
            if not self._is_started(lora_id) and not self._start(lora_id):
                self._held_up = True
                return

    def _start_planned(self) -> None:
        if self._cramped or not all(map(self._is_started, self._requested)):
            return  # what is free, and what becomes so, is theirs
        started = len(self._loads) + len(self._loaded) - len(self._requested)
        while self._planned and started < self._read_ahead:
            lora_id = next(iter(self._planned))
            if not self._is_known(lora_id):
                if not self._start(lora_id):
                    return
                started += 1
            del self._planned[lora_id]

    def _make_room(self) -> None:
        """Something else than what was read ahead is needed: what waits longest was read for rows that are gone."""
        staged = self._staged()
        if staged and len(staged) >= self._read_ahead:
            self._drop(staged[0])

    def _staged(self) -> list[str]:
        """Loaded, and asked for by no one, oldest first."""
        return [lora_id for lora_id in self._loaded if lora_id not in self._requested]

    def _drop(self, lora_id: str) -> None:
        self._loaded.pop(lora_id).release(was_installed=False)
        self._changes += 1

    def _has_room(self, lora_id: str) -> bool:
        """Whether the arena keeps, or now gets, the bytes that this adapter is expected to take."""
        if self._arena is None:
            return True
        if self._stuck_at.get(lora_id in self._requested) == self._state():
            return False
        nbytes = self._nbytes.get(lora_id, self._usual_nbytes)
        if self._arena.reserve(lora_id, nbytes):
            return True
        others = self._can_go(lora_id)
        if self._arena.lack(lora_id, nbytes) > sum(self._nbytes[other] for other in others):
            return False
        for other in others:
            self._give_way(other)
            if self._arena.reserve(lora_id, nbytes):
                return True
        return False

    def _can_go(self, lora_id: str) -> list[str]:
        """Whose bytes an adapter may have, in this order: those of what no row needs; if rows wait for it, also of what
        was only read ahead, and of what does not run although nothing else does."""
        spare = self._slots.spare()
        if lora_id not in self._requested:
            return spare
        return [*spare, *self._staged()[::-1], *self._slots.stalled()]

    def _give_way(self, lora_id: str) -> None:
        """What was read ahead is read again in its turn."""
        if lora_id in self._loaded:
            self._drop(lora_id)
            self._planned = {lora_id: None, **self._planned}
        else:
            self._slots.evict(lora_id)

    def _try_again(self, lora_id: str, nbytes: int) -> None:
        """After a load that ended for lack of room: others give way if they can, and it is due again."""
        if self._arena is not None:
            self._arena.cancel(lora_id)
        self._nbytes[lora_id] = nbytes
        is_requested = lora_id in self._requested
        if is_requested:
            self._cramped.add(lora_id)
        else:
            self._planned = {lora_id: None, **self._planned}
        # what was in its way may be gone by now: what rows wait for waits only where something is left that can go
        if others := self._can_go(lora_id):
            self._give_way(others[0])
        elif not is_requested or len(self._loads) or self._slots.in_use:
            self._stuck_at[is_requested] = self._state()

    def _state(self) -> tuple[int, int, int]:
        """Differs once there may be more room than before: something has gone, or may go."""
        return self._changes, self._slots.changes, len(self._requested)

    def _error(self, lora_id: str, outcome: LoadedLora | BaseException) -> BaseException | None:
        """What a load failed of; else the adapter is there. Raises what is no one adapter's fault."""
        if self._arena is not None:
            self._arena.cancel(lora_id)
        if isinstance(outcome, BaseException):
            if isinstance(outcome, Interrupted) or is_device_error(outcome):
                raise outcome
            return outcome
        if self._sha256.get(lora_id, outcome.sha256) != outcome.sha256:
            outcome.release(was_installed=False)
            return AdapterError(f"adapter {lora_id!r}: its files have changed since its first rows ran")
        del self._short_of_memory[lora_id]
        self._cramped.discard(lora_id)
        self._nbytes[lora_id] = self._usual_nbytes = outcome.nbytes
        self._loaded[lora_id] = outcome
        return None

    def _fail(self, lora_id: str, error: BaseException) -> None:
        """Its rows end, and it is not tried again."""
        self._requested.pop(lora_id, None)
        self._cramped.discard(lora_id)
        self.failures[lora_id] = row_error(lora_id, error)
        self._newly_failed.append(lora_id)
