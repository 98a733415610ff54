"""The adapter slots: bounds, LRU, pins, read-ahead, failures; loading is held back by hand where order matters."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from punica_batch_kernels.sgmv.types import LoraGroup, SlotWeights

from punica_batch.engine.lora_arena import Arena, NoRoom
from punica_batch.engine.lora_pack import PackedAdapter
from punica_batch.engine.lora_store import LoraStore
from punica_batch.errors import AdapterError, RowError, StoreAway
from punica_batch.models.lora import ModelLora

NBYTES = 4  # of a Loader's adapters


class Loader:
    """Loads at once unless ``gate`` is closed; ``bad`` adapters raise; ``sha256`` may be changed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.bad: dict[str, Exception] = {}
        self.sha256: dict[str, str] = {}
        self.weights: dict[str, SlotWeights] = {}  # of the last load

    def __call__(self, lora_id: str) -> PackedAdapter:
        self.calls.append(lora_id)
        assert self.gate.wait(10)
        if lora_id in self.bad:
            raise self.bad[lora_id]
        weights = SlotWeights(torch.zeros(1, 1), (None,), (0,))
        self.weights[lora_id] = weights
        return PackedAdapter(self.sha256.get(lora_id, f"sha-{lora_id}"), weights.a, (weights,), None)


@pytest.fixture
def loader() -> Iterator[Loader]:
    loader = Loader()
    yield loader
    loader.gate.set()


def make(loader: Loader, max_loras: int = 2, read_ahead: int = 2) -> LoraStore:
    model_lora = ModelLora([], LoraGroup(1, (0, 1), [None] * max_loras), [None] * max_loras)
    return LoraStore(model_lora, loader, max_loras=max_loras, read_ahead=read_ahead)


def in_slots(store: LoraStore, loader: Loader) -> dict[int, str]:
    """Whose weights the kernels would find in each slot."""
    names = {id(weights): lora_id for lora_id, weights in loader.weights.items()}
    return {i: names[id(w)] for i, w in enumerate(store.model_lora.lm_head.slots) if w is not None}


def settle(store: LoraStore) -> list[str]:
    """Polls until nothing that was started is still loading."""
    failed = store.poll()
    while len(store._loads):
        store.wait(10)
        failed += store.poll()
    return failed + store.poll()


def bring(store: LoraStore, *lora_ids: str) -> None:
    for lora_id in lora_ids:
        store.request(lora_id)
        settle(store)
    store.check_integrity()


def test_a_requested_adapter_becomes_ready_by_polling(loader: Loader) -> None:
    store = make(loader)
    loader.gate.clear()
    assert not store.ready("a")
    store.request("a")
    store.request("a")
    assert store.poll() == []
    assert not store.ready("a")
    store.wait(0.01)  # comes back although nothing is loaded
    loader.gate.set()
    store.wait(10)
    assert not store.ready("a")  # only poll changes what is resident
    store.poll()
    assert store.ready("a")
    assert store.sha256("a") == "sha-a"
    assert store.sha256(None) is None
    assert loader.calls == ["a"]
    assert in_slots(store, loader) == {store.slot("a"): "a"}


def test_the_least_recently_used_goes_and_its_slot_is_reused(loader: Loader) -> None:
    store = make(loader)
    bring(store, "a", "b")
    assert store.ready("a")  # touches a: b is now the older
    slot_of_b = store.slot("b")
    bring(store, "c")
    assert (store.ready("a"), store.ready("b"), store.ready("c")) == (True, False, True)
    assert store.slot("c") == slot_of_b
    assert len(store.resident) == 2


def test_pinned_adapters_stay_and_a_request_without_a_slot_does_nothing(loader: Loader) -> None:
    store = make(loader)
    bring(store, "a", "b")
    store.pin("a")
    store.pin("a")
    store.pin("b")
    store.request("c")
    assert loader.calls == ["a", "b"]
    store.unpin("a")
    store.request("c")
    assert loader.calls == ["a", "b"]  # one row still runs on a
    store.unpin("a")
    bring(store, "c")
    assert (store.ready("a"), store.ready("b"), store.ready("c")) == (False, True, True)


def test_a_loaded_adapter_waits_when_its_slot_was_pinned_meanwhile(loader: Loader) -> None:
    store = make(loader, max_loras=1)
    bring(store, "a")
    store.request("b")
    store.pin("a")
    settle(store)
    assert store.ready("a")
    assert not store.ready("b")
    store.unpin("a")
    store.poll()
    assert store.ready("b")
    assert loader.calls == ["a", "b"]


def test_evicted_and_loaded_again(loader: Loader) -> None:
    store = make(loader, max_loras=1)
    bring(store, "a", "b", "a")
    assert store.ready("a")
    assert loader.calls == ["a", "b", "a"]


def test_an_adapter_that_changed_between_two_loads_is_refused(loader: Loader) -> None:
    store = make(loader, max_loras=1)
    bring(store, "a", "b")
    loader.sha256["a"] = "other"
    store.request("a")
    assert settle(store) == ["a"]
    assert store.failures["a"].code == "adapter_unreadable"
    assert store.ready("b")


def test_read_ahead_is_in_order_and_bounded(loader: Loader) -> None:
    store = make(loader, read_ahead=3)
    store.prefetch(["c", "a", "b", "e", "d"])
    settle(store)
    assert sorted(loader.calls) == ["a", "b", "c"]
    assert len(store.resident) == 0  # staged, not in a slot: nobody has asked
    bring(store, "c")
    assert store.ready("c")
    assert sorted(loader.calls) == ["a", "b", "c", "e"]


def test_what_was_read_ahead_in_vain_makes_room(loader: Loader) -> None:
    store = make(loader, read_ahead=2)
    store.prefetch(["gone1", "gone2"])
    settle(store)
    for lora_id in ("a", "b", "c"):
        bring(store, lora_id)
        assert len(store._loaded) <= 2
    assert len(store._loaded) == 1  # one made room, as much as was needed
    store.prefetch(["next"])
    settle(store)
    assert loader.calls[-1] == "next"


def test_without_read_ahead_requests_still_load(loader: Loader) -> None:
    store = make(loader, read_ahead=0)
    store.prefetch(["a", "b"])
    assert loader.calls == []
    bring(store, "a")
    assert loader.calls == ["a"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AdapterError("adapter 'x': tensor y holds NaN"), "adapter_unreadable: adapter 'x': tensor y holds NaN"),
        (RowError("adapter_unreadable", "no"), "adapter_unreadable: no"),
        (ZeroDivisionError("secret detail"), "adapter_unreadable: adapter 'x' cannot be loaded (ZeroDivisionError)"),
    ],
)
def test_a_bad_adapter_fails_alone_and_is_not_tried_again(loader: Loader, error: Exception, message: str) -> None:
    store = make(loader)
    loader.bad["x"] = error
    store.request("x")
    store.request("a")
    assert settle(store) == ["x"]
    assert str(store.failures["x"]) == message
    assert store.ready("a")
    store.request("x")
    store.prefetch(["x"])
    assert settle(store) == []
    assert sorted(loader.calls) == ["a", "x"]
    store.check_integrity()


def test_a_failure_while_reading_ahead_is_told_too(loader: Loader) -> None:
    store = make(loader)
    loader.bad["x"] = AdapterError("no")
    store.prefetch(["x"])
    assert settle(store) == ["x"]


def test_a_store_that_is_away_is_nobodys_row(loader: Loader) -> None:
    store = make(loader)
    loader.bad["x"] = StoreAway("the store does not answer")
    store.request("x")
    with pytest.raises(StoreAway):
        settle(store)
    assert not store.failures


@pytest.mark.parametrize("seed", range(5))
def test_random_use_against_a_plain_lru(loader: Loader, seed: int) -> None:
    """Same residents as an LRU cache of pins and touches written in four lines."""
    choose = random.Random(seed)
    store = make(loader, max_loras=3, read_ahead=2)
    lru: list[str] = []
    pins: list[str] = []
    for _ in range(300):
        lora_id = choose.choice("abcdef")
        action = choose.choice(["ready", "bring", "pin", "unpin", "prefetch"])
        if action == "ready" and lora_id in lru:
            lru.append(lru.pop(lru.index(lora_id)))
            assert store.ready(lora_id)
        elif action == "bring":
            if lora_id not in lru and len(set(pins)) < 3:
                if len(lru) == 3:
                    lru.remove(next(x for x in lru if x not in pins))
                lru.append(lora_id)
            bring(store, lora_id)
        elif action == "pin" and lora_id in lru:
            pins.append(lora_id)
            store.pin(lora_id)
        elif action == "unpin" and lora_id in pins:
            pins.remove(lora_id)
            store.unpin(lora_id)
        elif action == "prefetch":
            store.prefetch([lora_id])
            settle(store)
        store.check_integrity()
        assert store.resident == lru
        assert in_slots(store, loader) == {store.slot(x): x for x in lru}


def test_a_failure_beside_a_store_that_is_away_is_told_of_later(loader: Loader) -> None:
    store = make(loader)
    loader.bad = {"a": AdapterError("broken"), "b": StoreAway("away")}
    loader.gate.clear()
    store.request("a")
    store.request("b")
    loader.gate.set()
    while store._loads._ended.qsize() < 2:
        time.sleep(0.001)
    with pytest.raises(StoreAway):
        store.poll()
    del loader.bad["b"]
    assert settle(store) == ["a"]


def test_a_load_without_room_comes_again_when_rows_of_the_base_model_end(loader: Loader) -> None:
    model_lora = ModelLora([], LoraGroup(1, (0, 1), [None]), [None])
    store = LoraStore(model_lora, loader, max_loras=1, read_ahead=0, arena=Arena(NBYTES))
    loader.bad = {"a": NoRoom(NBYTES)}
    store.request("a")
    while not loader.calls or len(store._loads):
        store.poll(rows_run=True)
    for _ in range(3):
        store.poll(rows_run=True)
    assert loader.calls == ["a"], "nothing has changed"
    loader.bad = {}
    store.poll()
    store.wait(10)
    store.poll()
    assert store.ready("a")


def test_a_load_that_has_its_bytes_asks_for_no_more(loader: Loader) -> None:
    """Room for three: one is there, one has its bytes and is still being loaded, and the third evicts no one."""
    arena, has_bytes = Arena(3 * NBYTES), threading.Event()

    def load(lora_id: str) -> PackedAdapter:
        arena.allocate(NBYTES, lora_id)
        has_bytes.set()
        return loader(lora_id)

    model_lora = ModelLora([], LoraGroup(1, (0, 1), [None] * 3), [None] * 3)
    store = LoraStore(model_lora, load, max_loras=3, read_ahead=0, arena=arena)
    bring(store, "a")
    store.pin("a")
    store.unpin("a")
    loader.gate.clear()
    has_bytes.clear()
    store.request("b")
    assert has_bytes.wait(10)
    store.request("c")
    assert store.ready("a")
    loader.gate.set()
    settle(store)
    assert len(store.resident) == 3
    assert sorted(loader.calls) == ["a", "b", "c"]
