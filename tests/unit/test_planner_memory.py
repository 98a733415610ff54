"""The memory plan: what fits, what pays, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from punica_batch.errors import ValidationError
from punica_batch.planner.memory import MemoryPlan, memory_plan

MIB = 2**20


def plan(**changes: Any) -> MemoryPlan:
    values: dict[str, Any] = {
        "total_bytes": 1000 * MIB,
        "weight_bytes": 400 * MIB,
        "kv_bytes_per_block": MIB,
        "block_size": 16,
        "max_model_len": 160,
        "max_num_batched_tokens": 2048,
        "adapter_sizes": [10 * MIB] * 5,
    }
    return memory_plan(**{**values, **changes})


def test_all_adapters_stay_and_the_rest_is_kv() -> None:
    got = plan()
    assert (got.max_loras, got.adapter_bytes) == (5, 50 * MIB)
    assert got.num_blocks == 550
    assert got.max_num_seqs == 55  # rows of 10 blocks
    assert got.adapters_fit == 59  # beside the 10 blocks of one row
    assert got.reasons == (
        "400.0 MiB for the base model and 0 B to compute in, of 1000.0 MiB that a worker may use",
        "50.0 MiB for 5 adapters at a time, 10.0 MiB each: all adapters of the job stay loaded (59 would fit)",
        "55 answers generated at a time: the KV cache has room for so many of average length",
        "550.0 MiB for the KV cache, 550 blocks of 16 tokens: all memory that is left",
    )
    few = plan(total_bytes=100_000 * MIB, num_sequences=7)
    assert few.reasons[2] == "7 answers generated at a time: the job has no more"
    assert few.reasons[3].endswith(": enough for all of them at the full length of 160 tokens")


def test_many_adapters_get_a_quarter_and_the_plan_says_so() -> None:
    got = plan(adapter_sizes=[10 * MIB] * 300)
    assert got.max_loras == 15
    assert got.reasons[1] == (
        "150.0 MiB for 15 adapters at a time, 10.0 MiB each: a quarter of what the base model leaves; "
        "the job has 300, which take turns; --max-loras changes it (59 would fit)"
    )
    assert plan(adapter_sizes=[10 * MIB] * 300, max_loras=1).reasons[1] == (
        "10.0 MiB for 1 adapter at a time, 10.0 MiB each: --max-loras says so (59 would fit)"
    )
    assert plan(adapter_sizes=[1] * 400).max_loras == 320
    # two slots although they take more than a quarter, so that one loads while one runs
    assert plan(adapter_sizes=[200 * MIB] * 300).max_loras == 2
    assert plan(adapter_sizes=[300 * MIB] * 300).max_loras == 1
    assert plan(adapter_sizes=[]).max_loras == 1


def test_adapters_of_many_sizes_share_a_number_of_bytes() -> None:
    got = plan(adapter_sizes=[*[MIB] * 200, *[40 * MIB] * 4])
    assert (got.max_loras, got.adapter_bytes) == (150, 150 * MIB)
    assert got.adapters_fit == 590 * 204 // 360
    assert got.reasons[1].startswith("150.0 MiB for about 84 adapters at a time, 1.0 MiB to 40.0 MiB each: a quarter")
    assert plan(adapter_sizes=[MIB, 40 * MIB]).reasons[1] == (
        "41.0 MiB for 2 adapters at a time, 1.0 MiB to 40.0 MiB each: all adapters of the job stay loaded "
        "(28 would fit)"
    )
    # the largest alone has to fit whatever is asked for
    assert plan(adapter_sizes=[MIB, 40 * MIB], max_loras=1).adapter_bytes == 40 * MIB


def test_the_batch_cap_is_what_pays() -> None:
    big = {"total_bytes": 100_000 * MIB}
    assert plan(**big).max_num_seqs == 256
    assert plan(**big).num_blocks == 2560  # no more than 256 rows of full length can use
    assert plan(**big, num_sequences=7).max_num_seqs == 7
    assert plan(**big, num_sequences=7).num_blocks == 70
    assert plan(**big, max_num_batched_tokens=100).max_num_seqs == 100
    assert plan(**big, max_num_seqs=300).max_num_seqs == 300
    assert plan(**big, max_num_seqs=300, max_num_batched_tokens=100).max_num_seqs == 100
    assert plan(row_tokens=[16, 32, 48]).max_num_seqs == 256
    assert plan(row_tokens=[60, 61]).max_num_seqs == 550 // 4
    assert plan(row_tokens=[10_000]).max_num_seqs == 55
    assert plan(num_sequences=0).max_num_seqs == 1


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"needs 1000\.0 MiB .* may use 1000\.0 MiB"):
        plan(weight_bytes=1000 * MIB)
    with pytest.raises(ValidationError, match="the model needs"):
        plan(workspace_bytes=600 * MIB)


def test_a_full_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"one row of max_model_len 9760 needs .* lower --max-model-len"):
        plan(max_model_len=610 * 16)
    assert plan(max_model_len=590 * 16).max_loras == 1
    with pytest.raises(ValidationError, match="one row of max_model_len 9600"):
        plan(max_model_len=600 * 16)  # no room for an adapter beside it
    assert plan(max_model_len=600 * 16, adapter_sizes=[]).num_blocks == 600


def test_more_slots_than_fit_are_refused_with_how_many_do() -> None:
    assert plan(max_loras=59).num_blocks == 10
    with pytest.raises(ValidationError, match=r"--max-loras 60 needs 600\.0 MiB.* at most 59 fit"):
        plan(max_loras=60)


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 10**6),
    weights=st.integers(0, 10**6),
    workspace=st.integers(0, 1000),
    block_bytes=st.integers(1, 500),
    sizes=st.lists(st.integers(0, 5000), max_size=400) | st.lists(st.just(7), max_size=400),
    max_model_len=st.integers(1, 4000),
    budget=st.integers(1, 4096),
    lengths=st.lists(st.integers(1, 5000), max_size=5),
    max_num_seqs=st.none() | st.integers(1, 600),
    max_loras=st.none() | st.integers(1, 300),
)
@example(  # slots that cost nothing: as many fit as are asked for
    total=1, weights=0, workspace=0, block_bytes=1, sizes=[], max_model_len=1, budget=1, lengths=[],
    max_num_seqs=None, max_loras=2,
)  # fmt: skip
def test_a_plan_always_fits_and_can_always_run_a_full_row(
    total: int,
    weights: int,
    workspace: int,
    block_bytes: int,
    sizes: list[int],
    max_model_len: int,
    budget: int,
    lengths: list[int],
    max_num_seqs: int | None,
    max_loras: int | None,
) -> None:
    try:
        got = memory_plan(
            total_bytes=total,
            weight_bytes=weights,
            workspace_bytes=workspace,
            kv_bytes_per_block=block_bytes,
            block_size=16,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            adapter_sizes=sizes,
            row_tokens=lengths,
            max_num_seqs=max_num_seqs,
            max_loras=max_loras,
        )
    except ValidationError:
        row = -(-max_model_len // 16) * block_bytes
        average = math.ceil(sum(sizes) / max(len(sizes), 1))
        adapters = max(max(sizes, default=0), average * (max_loras or 0))
        assert weights + workspace + row + adapters > total or weights + workspace >= total
        return
    assert got.weight_bytes + got.workspace_bytes + got.kv_bytes + got.adapter_bytes <= total
    assert got.num_blocks * 16 >= max_model_len
    assert 1 <= got.max_num_seqs <= budget
    assert max_num_seqs is not None or got.max_num_seqs <= 256
    assert got.max_num_seqs == max_num_seqs or max_num_seqs is None or max_num_seqs > budget
    assert got.max_loras >= 1
    assert max_loras in (None, got.max_loras)
    assert got.adapter_bytes >= max(sizes, default=0), "an adapter that never fits would hold its rows up for ever"
    if max_loras is None:
        assert got.max_loras <= max(len(sizes), 1)
        assert got.adapter_bytes <= sum(sizes)
        assert sum(sorted(sizes)[: got.max_loras]) <= got.adapter_bytes, "no slot stays empty"
    assert len(got.reasons) == 4
