"""Limits worked out by hand: a load's steps, their products by bytes, operations and measurement, a token's mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from punica_batch.bench import limits, overhead
from punica_batch.bench.device import Ceilings
from punica_batch.bench.limits import ProductTable, Work, limit_of, simulate
from punica_batch.bench.popularity import load, popularity
from punica_batch.bench.record import Spread
from punica_batch.bench.serving import SETTLE_STEPS, steps_to_prefill
from punica_batch.bench.shapes import SHAPES
from punica_batch.bench.workbench import Workbench, workbench
from punica_batch.models.config import ModelConfig
from punica_batch.models.layers import Linear

SEVEN_B = ModelConfig.from_dict(SHAPES["7b"])


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with workbench("tiny", dtype="float32", device=torch.device("cpu"), ranks=(2, 4)) as made:
        yield made


def test_a_load_is_played_through_step_by_step() -> None:
    """Two rows at a time, six tokens a step: a prompt of 7 is cut, the third row waits for a place."""
    steps = simulate([4, 7, 2], [3, 1, 2], cap=2, batched_tokens=6, adapters=np.array([5, 6, 5]))
    assert steps == [
        Work(tokens=6, sampled=1, kv_tokens=4 + 2, pairs=(1 + 2 + 3 + 4) + (1 + 2), adapters=(5, 6)),
        Work(tokens=1 + 5, sampled=2, kv_tokens=5 + 7, pairs=3 + 4 + 5 + 6 + 7, adapters=(5, 6)),
        Work(tokens=1 + 2, sampled=2, kv_tokens=6 + 2, pairs=1 + 2, adapters=(5,)),
        Work(tokens=1, sampled=1, kv_tokens=3, pairs=0, adapters=(5,)),
    ]


@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=12),
    cap=st.integers(1, 5),
    spare=st.integers(0, 20),
)
def test_every_token_is_computed_once(rows: list[tuple[int, int]], cap: int, spare: int) -> None:
    prompts, new = ([row[i] for row in rows] for i in (0, 1))
    steps = simulate(prompts, new, cap, cap + spare)
    assert sum(step.tokens for step in steps) == sum(prompts) + sum(new) - len(rows)
    assert sum(step.sampled for step in steps) == sum(new)
    assert max(step.tokens for step in steps) <= cap + spare
    assert sum(step.pairs for step in steps) == sum(n * (n + 1) // 2 for n in prompts)


@pytest.mark.parametrize(("cap", "rows", "tokens_a_second"), [(32, 256, 6170), (256, 1024, 16050)])
def test_the_limit_of_a_known_device(cap: int, rows: int, tokens_a_second: int) -> None:
    """What was worked out elsewhere for the decode load, from an H200's measured products and attention's rate."""
    table = ProductTable([1, 32, 64, 128, 256, 512], [0.00371, 0.00385, 0.00384, 0.00421, 0.00614, 0.01166], [0.0] * 6)
    prompts, new = load("decode", rows)
    steps = simulate([len(prompt) for prompt in prompts], new, cap, 2048)
    limit = limit_of(steps, SEVEN_B, "float16", Ceilings(copy=3.74e12, product=729e12), [], table)
    assert sum(new) / limit.seconds == pytest.approx(
        tokens_a_second, rel=0.012
    )  # between 512 rows and the 8,192 of the rate


def test_a_roofline_by_hand() -> None:
    """One decode step of two rows with two adapters: bytes are what it costs; a large prefill costs operations."""
    ceilings = Ceilings(copy=1e12, product=1e14)
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    weights = 2 * (32 * layer + 32000 * 4096)
    decode = limit_of([Work(2, 2, 1000, 0, (0, 3))], SEVEN_B, "float16", ceilings, [7, 0, 0, 80_000_000])
    assert decode.products == pytest.approx(weights / 1e12)
    assert decode.attention == pytest.approx(1000 * 2 * 32 * 4096 * 2 / 1e12)
    assert decode.adapters == pytest.approx(80_000_007 / 1e12)
    assert decode.seconds == pytest.approx(decode.products + decode.attention + decode.adapters)
    prefill = limit_of([Work(4096, 0, 4096, 4096 * 4097 // 2, ())], SEVEN_B, "float16", ceilings, [])
    end = 4096**2 + 3 * 4096 * 11008  # past the last layer's attention, where only the sampled tokens go
    assert prefill.products == pytest.approx(2 * (32 * layer - end) * 4096 / 1e14)
    assert prefill.attention == pytest.approx(4 * 32 * 4096 * (4096 * 4097 // 2) / 1e14)


def test_past_the_last_layers_attention_only_sampled_tokens_count() -> None:
    """As in the engine. Without one, those weights are not even read."""
    layer, end, head = 4 * 4096**2 + 3 * 4096 * 11008, 4096**2 + 3 * 4096 * 11008, 32000 * 4096
    by_flop, by_bytes = Ceilings(copy=1e30, product=1.0), Ceilings(copy=1.0, product=1e30)

    def products(sampled: int, roof: Ceilings, **options: bool) -> float:
        return limit_of([Work(1000, sampled, 0, 0, ())], SEVEN_B, "float16", roof, [], **options).products

    assert products(3, by_flop) == pytest.approx(2 * (1000 * (32 * layer - end) + 3 * (end + head)))
    assert products(3, by_bytes) == pytest.approx(2 * (32 * layer + head))
    assert products(0, by_bytes) == pytest.approx(2 * (32 * layer - end))
    assert products(3, by_flop, whole_last_layer=True) == pytest.approx(2 * (1000 * 32 * layer + 3 * head))
    assert products(0, by_bytes, whole_last_layer=True) == pytest.approx(2 * 32 * layer)


def test_measured_products_are_of_the_rows_that_pass_through_them(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed as the weights times the rows that go through: the table adds up to what a step computes."""
    computed = [0]

    def apply(linear: Linear, x: torch.Tensor) -> None:
        computed[0] += linear.weight.numel() * x.shape[0]

    def timed(step: Callable[[], object], *_: object, **__: object) -> Spread:
        computed[0] = 0
        step()
        return Spread.of([float(computed[0])])

    monkeypatch.setattr(Linear, "apply", apply)
    monkeypatch.setattr(limits, "time_step", timed)
    table = ProductTable.measure(bench.model, rows=(1, 100, 1024))
    by_flop = Ceilings(copy=1e30, product=2.0)
    for tokens, sampled in ((100, 1), (100, 100), (1024, 1024)):
        step = [Work(tokens, sampled, 0, 0, ())]
        expected = limit_of(step, bench.config, bench.dtype, by_flop, []).products
        assert table.seconds(tokens, sampled) == pytest.approx(expected)


def test_products_between_and_beyond_what_was_measured() -> None:
    table = ProductTable([1, 3], [10.0, 20.0], [1.0, 2.0])
    assert table.seconds(2, 0) == pytest.approx(15.0)
    assert table.seconds(6, 1) == pytest.approx(40.0 + 1.0)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    spare=st.integers(1, 30),
)
def test_the_steps_of_a_prefill_are_bounded(lengths: list[int], spare: int) -> None:
    """Played through: so many steps later all rows decode."""
    budget = len(lengths) + spare
    bound = steps_to_prefill(sum(lengths), len(lengths), budget)
    steps = simulate(lengths, [1000] * len(lengths), len(lengths), budget)
    assert all(step.pairs == 0 for step in steps[bound:])


def test_the_limit_of_a_token_is_that_of_the_rows_mean_length(bench: Workbench) -> None:
    """They grow with each timed step, and have grown in those before."""
    steps = 21
    rows = overhead._rows(bench, "distinct", 3, steps + 2 * SETTLE_STEPS + 2)
    by_bytes = Ceilings(copy=1.0, product=1e30)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
    mean = 128 + SETTLE_STEPS + (1 + steps) / 2
    expected = 4 * (2 * layer + 512 * 64) + 3 * mean * (2 * 2 * 32 * 4) + 3 * bench.bytes_of_rank(4)
    assert overhead._limit(bench, by_bytes, "distinct", 4, rows, steps) == pytest.approx(expected)


def test_the_limit_counts_an_adapter_once_a_step() -> None:
    """All rows with one adapter read it once; with one each, as often as there are rows."""
    prompts, new = [3] * 8, [2] * 8
    identical = simulate(prompts, new, 8, 64, popularity("identical", 8))
    distinct = simulate(prompts, new, 8, 64, popularity("distinct", 8))
    assert [step.adapters for step in identical] == [(0,), (0,)]
    assert [len(step.adapters) for step in distinct] == [8, 8]
