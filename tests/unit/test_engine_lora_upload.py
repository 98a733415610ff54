"""Adapters by the device's way, on CPU tensors: the same elements as packing on the host, the same refusals."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_files import HIDDEN
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_upload_cases import MAX_RANK, PROJECTIONS, Device, check_same, drawn_tensors, write

from punica_batch.adapters.digest import DigestCache, combine
from punica_batch.adapters.store import Folder
from punica_batch.engine.lora_arena import NoRoom
from punica_batch.engine.lora_upload import DeviceLoader
from punica_batch.errors import AdapterError


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_adapter_lies_as_the_host_packs_it(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    targets = data.draw(st.lists(st.sampled_from([*PROJECTIONS, "lm_head", "embed_tokens"]), min_size=1, unique=True))
    ranks = {kind: data.draw(st.integers(1, MAX_RANK)) for kind in targets}
    dtypes = data.draw(
        st.lists(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), min_size=1, max_size=3)
    )
    scale = data.draw(st.sampled_from([0.25, 1.0, 3.0]))
    fields = {
        "target_modules": targets, "r": 1, "lora_alpha": 1, "rank_pattern": ranks,
        "alpha_pattern": {kind: scale * rank for kind, rank in ranks.items()},
    }  # fmt: skip
    tensors = drawn_tensors(targets, ranks, dtypes)
    shuffled = dict(data.draw(st.permutations(list(tensors.items()))))
    folder = write(tmp_path_factory.mktemp("adapter"), shuffled, data.draw(st.sampled_from([0, 8, 24])), **fields)
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    device = Device({"x": folder}, dtype)
    check_same(device, "x").release(was_installed=False)
    assert device.load.arena.free_bytes == device.load.arena.size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = drawn_tensors(PROJECTIONS, dict.fromkeys(PROJECTIONS, 3), [torch.float32])
    return write(tmp_path / "a", tensors, target_modules=PROJECTIONS, r=3, lora_alpha=6)


def rewrite(folder: Path, to: Path, name_part: str, index: int, value: float) -> tuple[Path, str]:
    """A copy with one value changed in the first tensor whose name has ``name_part``; and that name."""
    to.mkdir()
    (to / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    content = bytearray((folder / "adapter_model.safetensors").read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = next(n for n in header if name_part in n)
    begin, end = header[name]["data_offsets"]
    at = 8 + length + (begin if index >= 0 else end) + 4 * index
    content[at : at + 4] = struct.pack("<f", value)
    (to / "adapter_model.safetensors").write_bytes(content)
    return to, name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [0, 5, -1])
@pytest.mark.parametrize("part", ["0.self_attn.q_proj.lora_A", "2.mlp.down_proj.lora_B"])
def test_what_is_not_finite_is_named(folder: Path, tmp_path: Path, part: str, index: int, value: float) -> None:
    bad, name = rewrite(folder, tmp_path / "bad", part, index, value)
    device = Device({"good": folder, "bad": bad}, torch.float16)
    check_same(device, "good")  # its plan serves the other one, too
    free = device.load.arena.free_bytes
    for load in (device.load, device.load_by_host):
        with pytest.raises(AdapterError, match=rf"'bad' .*{name}.* holds NaN or Inf"):
            load("bad")
    assert device.load.arena.free_bytes == free
    check_same(device, "good")


def test_what_overflows_is_refused(folder: Path, tmp_path: Path) -> None:
    """40,000 fits float16, and twice that, by the scale, does not."""
    bad, _ = rewrite(folder, tmp_path / "bad", "0.self_attn.v_proj.lora_B", 7, 40_000.0)
    device = Device({"bad": bad}, torch.float16)
    for load in (device.load, device.load_by_host):
        with pytest.raises(AdapterError, match="'bad': its weights overflow float16"):
            load("bad")
    check_same(Device({"bad": bad}, torch.float32), "bad")


def test_one_plan_serves_all_of_a_layout(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"a{i}": rewrite(folder, tmp_path / f"a{i}", "q_proj.lora_A", 0, float(i))[0] for i in range(8)}
    device = Device(names, torch.float16)
    inspected: list[str] = []
    inspect = DeviceLoader._inspect
    monkeypatch.setattr(
        DeviceLoader, "_inspect", lambda self, raw: inspected.append(raw.spec.name) or inspect(self, raw)
    )
    with ThreadPoolExecutor(2) as threads:
        loaded = list(threads.map(device.load, names))
    assert len(inspected) == 1
    for i, adapter in enumerate(loaded):
        assert device.packed(adapter)[0] == float(i)
    assert len({adapter.sha256 for adapter in loaded}) == 8
    assert len({adapter.start for adapter in loaded}) == 8


@pytest.mark.parametrize("broken", ["missing", "short", "no header", "empty", "grown"])
def test_files_that_are_no_adapter_are_refused_as_on_the_host(folder: Path, tmp_path: Path, broken: str) -> None:
    bad, _ = rewrite(folder, tmp_path / "bad", "q_proj.lora_A", 0, 1.0)
    weights = bad / "adapter_model.safetensors"
    content = weights.read_bytes()
    if broken == "missing":
        weights.unlink()
    else:
        damaged = {"short": content[:-4], "no header": b"\xff" * 64, "empty": b"", "grown": content + b"0000"}[broken]
        weights.write_bytes(damaged)
    device = Device({"good": folder, "bad": bad}, torch.float16)
    messages = []
    for first in (False, True):
        if first:
            check_same(device, "good")
        for load in (device.load, device.load_by_host):
            with pytest.raises(AdapterError) as caught:
                load("bad")
            messages.append(str(caught.value))
    assert len(set(messages)) == 1


def test_too_large_a_rank_is_refused(tmp_path: Path) -> None:
    tensors = drawn_tensors(["q_proj"], {"q_proj": MAX_RANK + 1}, [torch.float16])
    folder = write(tmp_path / "a", tensors, r=MAX_RANK + 1)
    with pytest.raises(AdapterError, match=f"its rank is {MAX_RANK + 1}, .* up to {MAX_RANK}: raise max_lora_rank"):
        Device({"a": folder}, torch.float16).load("a")


def test_copies_of_base_layers_are_compared_with_the_models(tmp_path: Path) -> None:
    """By the host; the weights then lie as the others do."""
    tensors = drawn_tensors(["embed_tokens", "q_proj"], {"embed_tokens": 2, "q_proj": 2}, [torch.float32])
    device = Device({}, torch.float16)
    device.model.embed_tokens.normal_()
    name = "base_model.model.model.embed_tokens.weight"
    good = write(tmp_path / "a", tensors | {name: device.model.embed_tokens}, target_modules=["embed_tokens", "q_proj"])
    other = write(tmp_path / "b", tensors | {name: device.model.embed_tokens + 1},
                  target_modules=["embed_tokens", "q_proj"])  # fmt: skip
    embedding = device.model.embed_tokens
    device = Device({"good": good, "other": other}, torch.float16)
    device.model.embed_tokens.copy_(embedding)
    check_same(device, "good")
    with pytest.raises(AdapterError, match=r"its own copy of 'model\.embed_tokens' differs"):
        device.load("other")


def test_tensors_at_odd_places_go_by_the_host(tmp_path: Path) -> None:
    """A float32 tensor after a float16 one of odd size cannot be addressed as elements."""
    tensors = drawn_tensors(["q_proj"], {"q_proj": 1}, [torch.float32])
    names = list(tensors)
    tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] = torch.randn(1, HIDDEN)
    tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"] = torch.randn(HIDDEN // 2, 1)
    tensors[names[0]] = tensors[names[0]].half()
    folder = write(tmp_path / "a", tensors, target_modules=r".*q_proj|.*layers\.0\..*k_proj", r=1, lora_alpha=2)
    device = Device({"a": folder}, torch.float16)
    check_same(device, "a")


def test_no_room_is_told_and_leaves_nothing_behind(folder: Path) -> None:
    full = Device({"a": folder}, torch.float16)
    nbytes = full.load("a").nbytes
    device = Device({"a": folder}, torch.float16, room=2 * nbytes - 128)
    first = device.load("a")
    with pytest.raises(NoRoom) as caught:
        device.load("a")
    assert caught.value.nbytes == nbytes
    first.release(was_installed=False)
    assert device.load("a").start == first.start
    small = Device({"a": folder}, torch.float16, room=nbytes - 128)
    with pytest.raises(AdapterError, match=r"take .* bytes, and this engine keeps .* for adapters: raise max_loras"):
        small.load("a")


def test_numbers_are_what_numpy_would_say(folder: Path) -> None:
    """One matrix by hand: B of layer 0's v_proj, rank by rank, times alpha / r."""
    device = Device({"a": folder}, torch.float32)
    adapter = device.load("a")
    tensors = drawn_tensors(PROJECTIONS, dict.fromkeys(PROJECTIONS, 3), [torch.float32])
    b = tensors["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"].numpy()
    address = int(adapter.rows[0, 6])
    at = (address - device.memory.data_ptr()) // 4
    found = device.memory[at : at + b.size].numpy().reshape(3, -1)
    np.testing.assert_array_equal(found, (2 * b).T)


def test_a_file_that_is_known_is_not_digested_until_it_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is told a false digest, so that whose it is shows."""
    device = Device({"a": folder}, torch.float16)
    true = device.load("a").sha256
    digests = DigestCache(tmp_path / "cache")
    device = Device({"a": folder}, torch.float16, digests=digests)
    place, path = Folder(str(folder)), folder / "adapter_model.safetensors"
    stamp = place.stamp(path.name)
    assert stamp is not None
    monkeypatch.setattr("punica_batch.adapters.digest._SETTLE_SECONDS", -1.0)
    digests.put(place.identity(path.name), stamp, "f" * 64)
    config = hashlib.sha256((folder / "adapter_config.json").read_bytes()).hexdigest()
    assert device.load("a").sha256 == combine(config, "f" * 64)
    time.sleep(0.02)  # more than a tick of the file system's clock
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, int(stamp.version or 0)))
    assert place.stamp(path.name) == stamp  # size, time and inode: as they were
    assert device.load("a").sha256 == true


def test_what_a_load_digests_is_known_to_the_next_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("punica_batch.adapters.digest._SETTLE_SECONDS", -1.0)
    with DigestCache(tmp_path / "cache") as digests:
        sha256 = Device({"a": folder}, torch.float16, digests=digests).load("a").sha256
    weights = blake3((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    place = Folder(str(folder))
    stamp = place.stamp("adapter_model.safetensors")
    assert stamp is not None
    assert DigestCache(tmp_path / "cache").get(place.identity("adapter_model.safetensors"), stamp) == weights
    assert sha256 == combine(hashlib.sha256((folder / "adapter_config.json").read_bytes()).hexdigest(), weights)
