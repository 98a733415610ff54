"""``bench loading`` on the tiny model: which figures it writes, and that each adapter is loaded on its own."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from punica_batch.bench import engine, loading, overhead, textgen
from punica_batch.bench.loading import run
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.workbench import Workbench


def test_every_point_loads_its_own_adapters(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(BenchOptions(model_shape="tiny", dtype="float32", device="cpu", rank=2, results=tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "loading.jsonl").read_text().splitlines()]
    points = {(line["what"], line["parameters"]["from"], line["parameters"]["adapters"]) for line in lines}
    for place in ("page cache", "disk"):
        for count in (1, 4):
            assert ("time to first token", place, count) in points
            assert ("throughput lost while loading", place, count) in points
    assert ("time to first token", "page cache, digests known", 4) in points
    for line in lines:
        if line["what"] == "time to first token":
            assert line["n"] == line["parameters"]["adapters"]
            first, last = line["parameters"]["first"], line["parameters"]["last"]
            assert 0 < first <= line["median"] * 1.001 <= last * 1.01
        if line["what"] == "adapters loaded":
            last = next(x["parameters"]["last"] for x in lines if x["what"] == "time to first token" and
                        all(x["parameters"][k] == line["parameters"][k] for k in ("from", "adapters")))  # fmt: skip
            assert line["median"] * last == pytest.approx(line["parameters"]["adapters"], rel=1e-3)
    assert list(tmp_path.glob("loading*.png"))


@pytest.mark.parametrize("bench", [engine, loading, overhead, textgen])
def test_an_engine_is_gone_before_the_next_is_made(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes most of a GPU's memory."""
    pytest.importorskip("matplotlib")
    make, made = Workbench.engine, list[weakref.ref[Any]]()

    def one_at_a_time(self: Workbench, **options: Any) -> Any:
        gc.collect()
        assert not any(earlier() for earlier in made)
        new = make(self, **options)
        made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(Workbench, "engine", one_at_a_time)
    bench.run(BenchOptions(model_shape="tiny", dtype="float32", device="cpu", rank=2, results=tmp_path))
    assert made
