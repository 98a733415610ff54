"""Measuring kernel configurations on a GPU: what comes out is a table that the kernels can use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from punica_batch_kernels.sgmv import tuned
from punica_batch_kernels.sgmv.triton_config import ExpandConfig, ShrinkConfig, choose_config, load_table


def test_a_measured_table_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from punica_batch_kernels.sgmv.tuning import tune

    entries = list(tune([(256, (128, 64))], [16], [8], torch.float16, seconds=60))
    assert {(e["block_m"], e["num_tiles"]) for e in entries} == {(1, 8), (16, 8)}
    assert all(0 < e["microseconds"] <= e["rule_microseconds"] for e in entries)
    tuned.save_table(entries, tmp_path / "here.json", "this device")
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    load_table.cache_clear()
    for e in entries:
        want = ShrinkConfig(**e["shrink"]), ExpandConfig(**e["expand"])
        assert choose_config(e["block_m"], 5, 256, (128, 64), 9, 2, "here") == want
    load_table.cache_clear()
