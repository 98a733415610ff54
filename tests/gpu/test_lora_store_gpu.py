"""Adapters' way onto a GPU: the same elements as packed on the host, and slots that change under enqueued steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_upload_cases import PROJECTIONS, Device, check_same, drawn_tensors, write
from packing_cases import draw_moves, raw_data
from punica_batch_kernels.packing import reference
from punica_batch_kernels.packing.types import build_work

from punica_batch.engine.pinned import PinnedBuffer
from punica_batch.errors import AdapterError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [(torch.float16,), (torch.bfloat16,), DTYPES], ids=str)
def test_repacking_as_the_reference(stored: tuple[torch.dtype, ...], dtype: torch.dtype) -> None:
    from punica_batch_kernels.packing import triton_backend

    for ranks in ((16, 8, 64, 128), (1, 3, 17, 129)):
        moves, size, nbytes = draw_moves(ranks, stored, features=(4096, 11008), seed=3)
        raw = raw_data(moves, nbytes).cuda()
        ours, exact = (torch.full((size,), torch.nan, dtype=dtype, device="cuda") for _ in range(2))
        flags = torch.zeros(2, dtype=torch.int32, device="cuda")
        triton_backend.repack(ours, raw, build_work(moves, "cuda"), flags[:1])
        reference.repack(exact, raw, moves, flags[1:])
        assert torch.equal(ours.view(torch.uint8), exact.view(torch.uint8))
        assert flags.tolist() == [0, 0]
        for move in (moves[0], moves[-1]):
            bad = raw.clone()
            bad[: nbytes // move.dtype.itemsize * move.dtype.itemsize].view(move.dtype)[move.source] = torch.inf
            flags.zero_()
            triton_backend.repack(ours, bad, build_work(moves, "cuda"), flags[:1])
            assert flags.tolist() == [1, 0]


def test_registered_memory_is_pinned() -> None:
    buffer = PinnedBuffer(torch.device("cuda"))
    for nbytes in (5 << 20, 9 << 20):
        buffer.reserve(nbytes)
        buffer.memory(nbytes)[:] = bytes(range(256)) * (nbytes // 256)
        assert buffer.tensor(0, nbytes).is_pinned()
        assert torch.equal(buffer.tensor(0, nbytes).cuda().cpu(), buffer.tensor(0, nbytes))
    buffer.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_lie_as_the_host_packs_them(dtype: torch.dtype, tmp_path: Path) -> None:
    targets = [*PROJECTIONS, "lm_head", "embed_tokens"]
    ranks = {kind: 1 + 5 * i % 40 for i, kind in enumerate(targets)}
    folders = {}
    for i, stored in enumerate([[torch.float16], [torch.bfloat16], list(DTYPES)]):
        tensors = drawn_tensors(targets, ranks, stored)
        folders[f"a{i}"] = write(tmp_path / f"a{i}", tensors, target_modules=targets, r=1, rank_pattern=ranks)
    device = Device(folders, dtype, device="cuda")
    for name in folders:
        check_same(device, name)


def test_what_is_not_finite_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    tensors = drawn_tensors(PROJECTIONS, dict.fromkeys(PROJECTIONS, 8), [torch.float16])
    good = write(tmp_path / "good", tensors, target_modules=PROJECTIONS, r=8)
    next(reversed(tensors.values()))[-1, -1] = torch.nan
    bad = write(tmp_path / "bad", tensors, target_modules=PROJECTIONS, r=8)
    device = Device({"good": good, "bad": bad}, torch.float16, device="cuda")
    for _ in range(2):
        with pytest.raises(AdapterError, match=r"'bad'.*holds NaN or Inf"):
            device.load("bad")
        check_same(device, "good").release(was_installed=False)


def test_a_slot_changes_between_enqueued_steps(tmp_path: Path) -> None:
    """Long steps read what the tables lead to while adapters come and go in one slot and in the room of two; each step
    finds the adapter that was in the slot when it was enqueued."""
    folders, firsts = {}, {}
    for i in range(24):
        tensors = {n: torch.full_like(t, float(i)) for n, t in _tensors().items()}
        folders[f"a{i}"] = write(tmp_path / f"a{i}", tensors, target_modules=PROJECTIONS, r=8, lora_alpha=8)
        firsts[f"a{i}"] = float(i)
    nbytes = Device(folders, torch.float16, device="cuda").load("a0").nbytes
    device = Device(folders, torch.float16, room=2 * nbytes, max_loras=1, device="cuda")
    store = device.store(read_ahead=1)
    base, seen = device.memory.data_ptr(), []
    for name in folders:
        store.request(name)
        while not store.ready(name):
            store.poll()
            store.wait(0.001)
        torch.cuda._sleep(20_000_000)  # some 10 ms
        offset = (device.tables.entries[0, 0, 1] - base) // 2
        seen.append(device.memory.index_select(0, offset.view(1)))
    assert [float(value) for value in seen] == list(firsts.values())
    store.check_integrity()
    store.close()


def _tensors() -> dict[str, torch.Tensor]:
    return drawn_tensors(PROJECTIONS, dict.fromkeys(PROJECTIONS, 8), [torch.float16])
