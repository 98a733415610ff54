"""Where a launch's configuration comes from: the device's table, and the rule where that is silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from punica_batch_kernels.sgmv import tuned
from punica_batch_kernels.sgmv.tiles import GROUPED, PER_ROW, PREFILL, tile_bucket
from punica_batch_kernels.sgmv.triton_config import choose_config, load_table, rule, slice_columns

WIDTHS = (4096, 1024, 1024)
SHRINK = {"block_r": 16, "block_k": 64, "split_k": 2, "programs": 264, "num_warps": 8, "num_stages": 2}
EXPAND = {"block_r": 16, "block_n": 64, "blocks": 1, "num_warps": 8, "num_stages": 1}
ENTRY = {
    "block_m": GROUPED, "num_tiles": 16, "in_features": 4096, "widths": WIDTHS, "max_rank": 16, "itemsize": 2,
    "shrink": SHRINK, "expand": EXPAND, "microseconds": 4.5, "rule_microseconds": 5.0,
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    tuned.save_table([ENTRY], tmp_path / "x100.json", "a device")
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    load_table.cache_clear()
    yield "x100"
    load_table.cache_clear()


@pytest.mark.parametrize(("tiles", "rank"), [(16, 16), (9, 16), (12, 8), (16, 1)])
def test_an_entry_serves_its_bucket(table: str, tiles: int, rank: int) -> None:
    shrink, expand = choose_config(GROUPED, tiles, 4096, WIDTHS, rank, 2, table)
    assert (shrink.split_k, shrink.num_warps, expand.block_n) == (2, 8, 64)


@pytest.mark.parametrize(
    "asked",
    [
        (GROUPED, 17, 4096, WIDTHS, 16, 2),
        (GROUPED, 16, 4096, WIDTHS, 17, 2),
        (GROUPED, 16, 4096, WIDTHS[:2], 16, 2),
        (GROUPED, 16, 2048, WIDTHS, 16, 2),
        (GROUPED, 16, 4096, WIDTHS, 16, 4),
        (PER_ROW, 16, 4096, WIDTHS, 16, 2),
    ],
)
def test_the_rule_answers_for_what_was_not_measured(
    table: str, asked: tuple[int, int, int, tuple[int, ...], int, int]
) -> None:
    block_m, tiles, into, widths, rank, itemsize = asked
    assert choose_config(*asked, table) == rule(block_m, tiles, into, len(widths), rank, itemsize)
    assert choose_config(*asked, "another") == choose_config(*asked, "") == choose_config(*asked, table)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce", ""),
    ],
)
def test_a_table_is_found_by_the_devices_model(name: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "torch", SimpleNamespace(cuda=SimpleNamespace(get_device_name=lambda device: name)))
    tuned.device_name.cache_clear()
    assert tuned.device_name(torch.device("cuda", 5)) == file
    tuned.device_name.cache_clear()


def test_packaged_tables_are_sound() -> None:
    """What the kernels take for granted; ``test_sgmv_triton_aot`` compiles every entry."""
    for path in tuned.FOLDER.glob("*.json"):
        assert load_table(path.stem), path.name
        for key, (shrink, expand) in load_table(path.stem).items():
            assert key.num_tiles == tile_bucket(key.num_tiles), key
            for size in (key.max_rank, shrink.block_r, shrink.block_k, shrink.split_k, expand.block_r, expand.block_n):
                assert size & (size - 1) == 0, key
            assert shrink.programs >= key.num_tiles, key
            assert key.block_m == PER_ROW or min(shrink.block_r, shrink.block_k, expand.block_r) >= 16, key


def splits(block_m: int, num_tiles: int, in_use: int, rank: int, max_rank: int) -> int:
    """As the kernels count the programs that share K, of three slices' adapter; in_use: rounded up by the bucket."""
    shrink = rule(block_m, num_tiles, 4096, 3, max_rank, 2)[0]
    blocks = -(-3 * rank // shrink.block_r)
    return min(max(shrink.programs // in_use // blocks, 1), shrink.split_k)


@pytest.mark.parametrize("block_m", [PER_ROW, GROUPED, PREFILL])
@pytest.mark.parametrize("tiles", [8, 16, 64, 256])
def test_the_highest_rank_takes_no_programs_from_the_others(block_m: int, tiles: int) -> None:
    for rank in (8, 16):
        alone = splits(block_m, tiles, tiles, rank, rank)
        assert splits(block_m, tiles, tiles, rank, 128) >= alone
        assert splits(block_m, tiles, tiles, 128, 128) >= 1


@pytest.mark.parametrize("block_m", [PER_ROW, GROUPED])
def test_room_for_more_tiles_takes_no_programs_from_those_in_use(block_m: int) -> None:
    for tiles in (16, 32, 64, 256):
        assert splits(block_m, tiles, 8, 16, 16) * 2 >= splits(block_m, 8, 8, 16, 16)


@pytest.mark.parametrize("block_m", [PER_ROW, GROUPED, PREFILL])
@pytest.mark.parametrize("rank", [1, 16, 100, 256])
def test_the_rule_gives_what_the_kernels_take_for_granted(block_m: int, rank: int) -> None:
    for tiles in (1, 9, 64, 300, 5000):
        for into in (64, 576, 11008):
            shrink, expand = rule(block_m, tiles, into, 2, rank, 4)
            assert shrink.programs >= tiles
            for size in (shrink.block_r, shrink.block_k, shrink.split_k, expand.block_r, expand.block_n):
                assert size & (size - 1) == 0
    assert rank <= slice_columns(rank) < rank + 16
    assert slice_columns(rank) % 4 == 0, "v is loaded 16 bytes at a time"
