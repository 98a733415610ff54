"""``bench tune``: what was measured becomes a table that the kernels can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from punica_batch_kernels.sgmv import tuned, tuning

from punica_batch.bench import tune
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.shapes import shape_config
from punica_batch.errors import UsageError

SHRINK = {"block_r": 16, "block_k": 256, "split_k": 4, "programs": 264, "num_warps": 4, "num_stages": 1}
EXPAND = {"block_r": 16, "block_n": 512, "blocks": 1, "num_warps": 1, "num_stages": 1}


def options(results: Path) -> BenchOptions:
    return BenchOptions(model_shape="tiny", dtype="float16", device="cpu", rank=4, results=results, seconds=9)


def test_the_table_is_what_the_kernels_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(*arguments: Any) -> Iterator[dict[str, Any]]:
        asked.extend(arguments)
        key = tuned.TableKey(1, 8, 64, (64, 32, 32), 4, 2)
        yield {**key._asdict(), "shrink": SHRINK, "expand": EXPAND, "microseconds": 3.0, "rule_microseconds": 4.5}

    monkeypatch.setattr(tune, "open_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(tune, "_compile_ahead", lambda *arguments: None)
    monkeypatch.setattr(tuned, "device_name", lambda device: "h200")
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "tune", measure)
    tune.run(options(tmp_path))
    shapes, ranks, rows, dtype, seconds = asked
    assert shapes == [(64, (64, 32, 32)), (64, (64,)), (64, (160, 160)), (160, (64,))]
    assert (ranks, rows, dtype) == ((4,), [1, 4], torch.float16)
    assert 0 < seconds <= 9
    (tmp_path / "sgmv-h200.json").rename(tmp_path / "h200.json")
    [(key, shrink, expand)] = tuned.read_table("h200")
    assert (key.widths, shrink, expand) == ((64, 32, 32), SHRINK, EXPAND)
    assert (tmp_path / "tune-tiny-float16-cpu.png").stat().st_size > 1000


def test_a_cpu_has_nothing_to_tune(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GPU only"):
        tune.run(options(tmp_path))


def test_a_7bs_groups() -> None:
    assert tune.layer_shapes(shape_config("7b")) == [
        (4096, (4096, 4096, 4096)),
        (4096, (4096,)),
        (4096, (11008, 11008)),
        (11008, (4096,)),
    ]
    assert tune.layer_shapes(shape_config("8b"))[0] == (4096, (4096, 1024, 1024))
