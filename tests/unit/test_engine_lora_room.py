"""Adapters of different sizes share the device's memory, on CPU tensors: which give way to which, and which do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lora_upload_cases import PROJECTIONS, Device, drawn_tensors, write

from punica_batch.engine.lora_store import LoraStore


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[tuple[Device, LoraStore]]:
    """Ranks of 2 and one of 32 in room for five of the small ones and the large one's half."""
    adapters = {}
    for i in range(12):
        rank = 32 if i == 5 else 2
        tensors = drawn_tensors(PROJECTIONS, dict.fromkeys(PROJECTIONS, rank), [torch.float16])
        tensors = {name: tensor + i for name, tensor in tensors.items()}
        adapters[f"a{i}"] = write(tmp_path / f"a{i}", tensors, target_modules=PROJECTIONS, r=rank, lora_alpha=rank)
    sizes = Device(adapters, torch.float16)
    device = Device(adapters, torch.float16, room=sizes.load("a5").nbytes + sizes.load("a0").nbytes, max_loras=6)
    store = device.store(read_ahead=3)
    yield device, store
    store.close()


def bring(store: LoraStore, lora_id: str) -> None:
    for _ in range(1000):
        store.request(lora_id)
        store.poll()
        store.check_integrity()
        if store.ready(lora_id):
            return
        store.wait(0.01)
    raise AssertionError(f"{lora_id} never came: {store.failures}")


def value_in_slot(device: Device, slot: int) -> float:
    """An element of the adapter that the tables lead to, less what all adapters have there."""
    at = (int(device.tables.entries[slot, 0, 1]) - device.memory.data_ptr()) // device.memory.itemsize
    return float(device.memory[at])


def test_a_large_adapter_takes_the_room_of_small_ones_in_turn(mixed: tuple[Device, LoraStore]) -> None:
    device, store = mixed
    expected = {name: float(device.load_by_host(name).buffer[0]) for name in device.settings.adapters}
    store.prefetch(device.settings.adapters)
    for i in [*range(12), 5, 0, 1, 5, 11]:
        name = f"a{i}"
        bring(store, name)
        store.pin(name)
        assert value_in_slot(device, store.slot(name)) == expected[name]
        store.unpin(name)
    assert not store.failures
    assert store.stats.adapters >= 12
    assert store.bytes_copied >= sum(
        (Path(spec.path) / "adapter_model.safetensors").stat().st_size - 16384
        for spec in device.settings.adapters.values()
    )


def test_pinned_ones_keep_their_bytes_and_others_wait(mixed: tuple[Device, LoraStore]) -> None:
    device, store = mixed
    for name in ("a0", "a1", "a2"):
        bring(store, name)
        store.pin(name)
    before = {name: value_in_slot(device, store.slot(name)) for name in ("a0", "a1", "a2")}
    for _ in range(20):
        store.request("a5")
        store.poll()
        store.wait(0.005)
        store.check_integrity()
    assert not store.ready("a5")  # beside three small ones it has no room
    assert before == {name: value_in_slot(device, store.slot(name)) for name in before}
    for name in before:
        store.unpin(name)
    bring(store, "a5")


def test_what_was_read_ahead_gives_way_to_what_is_asked_for(mixed: tuple[Device, LoraStore]) -> None:
    _, store = mixed
    store.prefetch(["a5"])
    for _ in range(500):
        store.poll()
        if store._staged():
            break
        store.wait(0.01)
    store.prefetch(["a1", "a2", "a3"])
    bring(store, "a0")
    store.pin("a0")
    bring(store, "a1")
    store.pin("a1")
    assert not store.ready("a5")
    store.unpin("a0")
    store.unpin("a1")
    bring(store, "a5")
