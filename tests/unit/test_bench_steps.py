"""What is timed: the add-on and the model's steps do the work that their figures are named after."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from punica_batch_kernels.sgmv import backend_for
from punica_batch_kernels.sgmv.tiles import PER_ROW

from punica_batch.bench import clocks, sgmv
from punica_batch.bench import device as device_module
from punica_batch.bench import steps as steps_module
from punica_batch.bench.ablations import with_tiles
from punica_batch.bench.add_on import COLD_BYTES, MOST_PRODUCTS, AddOn, segments_of
from punica_batch.bench.batching import fitting_tokens
from punica_batch.bench.clocks import Clocks
from punica_batch.bench.device import Ceilings, ceilings, host_link, time_step
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.popularity import POPULARITIES, Popularity, popularity
from punica_batch.bench.record import Spread
from punica_batch.bench.shapes import SHAPES, shape_config
from punica_batch.bench.steps import ModelSteps

CPU = torch.device("cpu")
OPTIONS = BenchOptions(model_shape="tiny", dtype="float32", device="cpu", rank=4)


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C kernels are compiled."""
    monkeypatch.setattr(steps_module, "cache_folder", lambda: None)


@pytest.mark.parametrize("unsplit", [False, True])
@pytest.mark.parametrize("kind", POPULARITIES)
def test_the_add_on_adds_each_rows_adapter(kind: Popularity, unsplit: bool) -> None:
    add_on = AddOn([(8, (6, 10)), (10, (4,))], 2, [1, 2, 3, 4, 5], torch.float32, CPU)
    segments, lengths = segments_of(kind, 5, CPU)
    slots = [slot for slot, rows in enumerate(lengths) for _ in range(rows)]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_lora(y: torch.Tensor, x: torch.Tensor, group: Any, segments: Any, buffer: torch.Tensor | None) -> None:
        assert (buffer is not None) == unsplit
        before = y.clone()
        backend_for(CPU).add_lora(y, x, group, segments, buffer)
        expected = before.double()
        for row, slot in enumerate(slots):
            weights, at = group.slots[slot], 0
            assert weights.ranks == (slot + 1,) * len(group.out_widths)
            for i, b in enumerate(weights.b):
                a = weights.a[i * (slot + 1) : (i + 1) * (slot + 1)]
                expected[row, at : at + b.shape[0]] += b.double() @ (a.double() @ x[row].double())
                at += b.shape[0]
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
        seen.append((x, y))

    add_on.step(add_lora, [segments], unsplit=unsplit)()
    assert len(seen) == 4
    assert len({weights.a.data_ptr() for group in add_on.groups for weights in group.slots if weights}) == 20


def test_what_the_add_on_must_move_and_compute() -> None:
    add_on = AddOn([(8, (6, 10))], 3, [2, 5], torch.float16, CPU)
    first, second = 2 * (2 * 8 + 16), 5 * (2 * 8 + 16)  # elements of the adapters' weights
    assert add_on.flop([3, 1]) == 2 * (3 * first + second)
    assert add_on.moved([3, 1], activations=False) == 2 * (first + second)
    assert add_on.moved([3, 1]) == 2 * (first + second + 4 * (8 + 2 * 16))
    assert add_on.moved([4]) == 2 * (first + 4 * (8 + 2 * 16))


def test_turns_read_more_than_a_cache_holds_before_any_weight_again() -> None:
    """Other slots each time, of the same ranks: as many as it takes, as there are, as a graph may hold."""
    add_on = AddOn([(8, (6,))], 3, [4] * 9, torch.float16, CPU, cold_bytes=3 * 2 * 4 * 14 * 8)  # eight adapters'
    assert [turn.lora_indices for turn in add_on.turns("identical", 5)[0]] == [(slot,) for slot in range(8)]
    turns, lengths = add_on.turns("uniform", 5)
    assert lengths == [2, 2, 1]
    assert [turn.lora_indices for turn in turns] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert all(turn.lengths == (2, 2, 1) for turn in turns)
    mixed = AddOn([(8, (6,))], 3, [1, 4] * 5, torch.float16, CPU, cold_bytes=1 << 20)
    assert [turn.lora_indices for turn in mixed.turns("identical", 2)[0]] == [(0,), (2,), (4,), (6,), (8,)]
    assert [turn.lora_indices for turn in mixed.turns("uniform", 5)[0]] == [(0, 1, 2), (4, 5, 6)]
    many = AddOn([(8, (6,))], MOST_PRODUCTS // 4, [1] * 9, torch.float16, CPU, cold_bytes=1 << 30)
    assert len(many.turns("identical", 2)[0]) == 4


@pytest.mark.parametrize("rank", [8, 16, 128])
def test_one_adapter_for_all_rows_is_read_from_memory(rank: int) -> None:
    """Of a 4096 x 4096 projection, at the sizes of the quick runs: 128 MiB at least, where an H200 caches 50 MB."""
    add_on = AddOn([(1, (1,))], 32, [1] * 32, torch.float16, CPU, cold_bytes=COLD_BYTES)
    add_on.shapes, add_on.ranks = [(4096, (4096,))], [rank] * 32  # whose weights would fill this machine
    turns, lengths = add_on.turns("identical", 32)
    read = len(turns) * add_on.layers * add_on.moved(lengths, activations=False)
    assert read >= min(COLD_BYTES, rank << 24)
    assert read < 2 * COLD_BYTES
    assert len({turn.lora_indices for turn in turns}) == len(turns)


def test_a_step_of_turns_adds_every_one(monkeypatch: pytest.MonkeyPatch) -> None:
    add_on = AddOn([(8, (6,))], 2, [4] * 3, torch.float32, CPU, cold_bytes=1 << 20)
    turns, _ = add_on.turns("identical", 2)
    asked: list[tuple[int, tuple[int, ...]]] = []

    def add_lora(y: Any, x: Any, group: Any, segments: Any, buffer: Any) -> None:
        asked.append((id(group), segments.lora_indices))

    add_on.step(add_lora, turns)()
    first, second = map(id, add_on.groups)
    assert asked == [(group, (slot,)) for slot in range(3) for group in (first, second)]


@pytest.mark.parametrize("name", ["sgmv", "loop", "gather-bmm"])
def test_a_figure_is_of_one_product(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many turns there are: each step "takes" a second a product, and adds each turn's adapter."""
    plain, products = AddOn, [0]

    def cold(*arguments: Any) -> AddOn:
        return plain(*arguments, cold_bytes=1 << 20)

    def timed(step: Callable[[], None], *_: Any, **__: Any) -> Spread:
        products[0] = 0
        step()
        return Spread.of([float(products[0])])

    def count(*_: Any) -> None:
        products[0] += 1

    monkeypatch.setattr(sgmv, "AddOn", cold)
    monkeypatch.setattr(sgmv, "time_step", timed)
    monkeypatch.setattr(sgmv, "loop", count)
    monkeypatch.setattr(sgmv.GatherBmm, "add", count)
    monkeypatch.setattr(sgmv, "backend_for", lambda _: SimpleNamespace(add_lora=count))
    monkeypatch.setattr(sgmv, "draw", lambda _: None)
    sgmv.run(replace(OPTIONS, results=tmp_path))
    written = [json.loads(line) for line in (tmp_path / "sgmv.jsonl").read_text().splitlines()]
    own = [line for line in written if line["parameters"]["provider"] == name]
    assert own
    assert {line["median"] for line in own} == {1e6}


def test_segments_group_the_rows() -> None:
    segments, lengths = segments_of("uniform", 10, CPU)
    assert segments.lengths == tuple(lengths) == (3, 3, 2, 2)
    assert segments.lora_indices == (0, 1, 2, 3)
    base, none = segments_of(None, 7, CPU)
    assert (base.lengths, base.lora_indices, none) == ((7,), (-1,), [])


def test_other_tiles_only_where_kernels_have_any() -> None:
    segments, _ = segments_of("distinct", 4, CPU)
    assert with_tiles(segments, PER_ROW) is segments


@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 5, 5]])
def test_a_step_is_the_models(counts: list[int]) -> None:
    """Its rows' keys and values lie in blocks of their own: a step of three sequences is three steps of one."""
    steps = ModelSteps(OPTIONS, CPU, kv_tokens=3 * 32, adapters=2)
    hidden: list[torch.Tensor] = []
    inner = steps.model.forward

    def forward(*arguments: Any) -> torch.Tensor:
        hidden.append(inner(*arguments))
        return hidden[-1]

    steps.model.forward = forward  # type: ignore[method-assign]
    segments, _ = segments_of(None, sum(counts), CPU)
    with torch.inference_mode():
        for _ in range(2):
            steps.step(counts, 20, segments)()
    assert hidden[0].shape == (sum(counts), 64)
    assert torch.isfinite(hidden[0]).all()
    meta = steps._meta(counts, 20)
    expected = [(2 * i + p // 16) * 16 + p % 16 for i, n in enumerate(counts) for p in range(20 - n, 20)]
    assert meta.slot_mapping.tolist() == expected
    assert meta.block_tables.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert meta.kv_lens.tolist() == [20] * 3
    assert (meta.num_prefills, meta.num_prefill_tokens) == ((0, 0) if counts[0] == 1 else (3, 15))


def test_a_steps_adapters_change_its_rows() -> None:
    steps = ModelSteps(OPTIONS, CPU, kv_tokens=64, adapters=2, layers=1)
    hidden: list[torch.Tensor] = []
    inner = steps.model.forward
    steps.model.forward = lambda *args: hidden.append(inner(*args)) or hidden[-1]  # type: ignore[method-assign, func-returns-value]
    with torch.inference_mode():
        for kind in (None, "distinct"):
            segments, _ = segments_of(kind, 2, CPU)  # type: ignore[arg-type]
            torch.manual_seed(5)
            steps.step([1, 1], 8, segments)()
    assert not torch.allclose(hidden[0][0], hidden[1][0], rtol=1e-3)
    assert not torch.allclose(hidden[0][1], hidden[1][1], rtol=1e-3)


def test_the_limit_of_a_step() -> None:
    steps = ModelSteps(OPTIONS, CPU, kv_tokens=32, adapters=1)
    weights = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160)  # two layers: q, k and v, o, gate, up and down
    head, kv = 64 * 512, 2 * 2 * 32 * 10
    slow_copy = Ceilings(copy=1.0, product=1e30)
    assert steps.limit(slow_copy, [1, 1], 10, 0, head=False) == pytest.approx(4 * (weights + 2 * kv))
    assert steps.limit(slow_copy, [1, 1], 10, 0) == pytest.approx(4 * (weights + 2 * kv + head))
    adapter = 2 * 4 * (3 * 64 + 128 + 64 + 64 + 2 * 64 + 320 + 160 + 64)
    assert steps.adapter_bytes == 4 * adapter
    assert steps.limit(slow_copy, [1, 1], 10, 3, head=False) == pytest.approx(4 * (weights + 2 * kv + 3 * adapter))
    slow_product = Ceilings(copy=1e30, product=1.0)
    pairs = 2 * sum(range(6, 11))  # of queries and the keys that they see: the last five of ten, twice
    expected = 2 * weights * 10 + 2 * head * 2 + 4 * 2 * 64 * pairs
    assert steps.limit(slow_product, [5, 5], 10, 0) == pytest.approx(expected)


def test_a_cpu_has_room_and_a_limit_is_the_slower_of_two() -> None:
    assert fitting_tokens(OPTIONS, CPU, 1000, adapters=8) == 1000
    assert Ceilings(copy=10.0, product=100.0).seconds(moved=50, flop=200) == 5
    assert Ceilings(copy=10.0, product=100.0).seconds(moved=5, flop=200) == 2


def test_timing_on_a_cpu() -> None:
    calls: list[int] = []
    spread = time_step(lambda: calls.append(1), CPU)
    assert (len(calls), spread.n) == (4, 3)
    assert 0 < spread.p10 <= spread.median <= spread.p90
    measured = ceilings(CPU, torch.float32)
    assert measured is ceilings(CPU, torch.float32)
    assert measured.copy > 0
    assert measured.product > 0
    assert host_link(CPU) > 0


@pytest.mark.parametrize(("name", "parameters"), [("7b", 6.74e9), ("8b", 8.03e9), ("13b", 13.02e9)])
def test_shapes_are_the_models(name: str, parameters: float) -> None:
    config = shape_config(name)
    assert config.num_parameters() == pytest.approx(parameters, rel=2e-3)
    assert config.head_dim == 128
    assert set(SHAPES) == {"7b", "8b", "13b", "tiny"}
    assert len(set(popularity("distinct", 9))) == 9


def test_the_fastest_way_to_move_bytes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy and a kernel read and write each byte; an addition reads two."""
    took = iter([4.0, 1.0, 1.25])
    monkeypatch.setattr(device_module, "time_step", lambda *_, **__: Spread.of([next(took)]))
    assert device_module._copy_rate(CPU, torch.float32) == 3 * (1 << 19) / 1.25


def test_clock_and_power_while_something_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    read, enough = iter([(1980, 120_000), (1300, 695_400), (1350, 690_000)]), threading.Event()
    now = [0, 0]

    def clock_rate(_: torch.device) -> int:
        try:
            now[:] = next(read)
        except StopIteration:
            enough.set()
            raise
        return now[0]

    monkeypatch.setattr(clocks, "_PERIOD", 0.001)
    monkeypatch.setattr(torch.cuda, "clock_rate", clock_rate)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: now[1])
    with Clocks(torch.device("cuda")) as watched:
        assert enough.wait(10)
    assert watched.medians == {"sm_clock_mhz": 1350, "power_w": 690}
    with Clocks(CPU) as nothing:
        pass
    assert nothing.medians == {}


def test_steps_without_adapters_launch_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ModelSteps(OPTIONS, CPU, kv_tokens=64, adapters=0)

    def fail(*_: Any) -> None:
        raise AssertionError

    steps.model.use(replace(steps.model.kernels, add_lora=fail, ordered_lora_linear=fail))
    segments, _ = segments_of(None, 3, CPU)
    steps.step([1] * 3, 8, segments)()
