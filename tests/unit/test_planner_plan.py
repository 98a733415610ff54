"""The plan's arithmetic and its JSON schema."""

from __future__ import annotations

import json

from punica_batch.planner.memory import memory_plan
from punica_batch.planner.plan import (
    AdapterRows,
    InputFile,
    Plan,
    Preview,
    PreviewToken,
    adapter_summary,
    expected_errors,
    parts,
    placement_summary,
    token_estimate,
    window_summary,
)

ADAPTERS = [
    AdapterRows(None, 50),
    *(AdapterRows(f"a{i:02}", 10 + i, rank=[8, 16, 64][i % 3], nbytes=1000) for i in range(25)),
    AdapterRows("broken", 7, problem="bad_adapter: lora_A is missing"),
    AdapterRows("gone", 9, problem="unknown_adapter: not in the registry"),
    AdapterRows("gone too", 3, problem="unknown_adapter: not in the registry"),
]


def make_plan() -> Plan:
    adapters = adapter_summary(ADAPTERS, exact=True)
    return Plan(
        model="models/small",
        inputs=(InputFile("in.parquet", 1234, 700),),
        rows=700,
        samples=700,
        tokens=token_estimate([10, 20, 30], [256, 256, 256], rows=700, exact=False),
        adapters=adapters,
        errors=expected_errors(adapters, {"overlong": 2, "unknown_adapter": 1}, limit=20, allowance="20"),
        placement=placement_summary("cpu", ["00", "01", "02", "03"], samples=700, max_num_seqs=256, pack="busiest"),
        memory=memory_plan(
            total_bytes=1000,
            weight_bytes=100,
            kv_bytes_per_block=10,
            block_size=16,
            max_model_len=64,
            max_num_batched_tokens=64,
        ),
        window=window_summary(700, 28),
        parts=parts("out.parquet", 700, 300, single_file=True),
        previews=(Preview(0, "a00", (PreviewToken(1, "<s>"), PreviewToken(5, "Hi"))),),
    )


def test_tokens_are_scaled_up_from_a_sample() -> None:
    sampled = token_estimate([10, 20, 30], [5, 5, 8], rows=700, exact=False)
    assert (sampled.prompt_tokens, sampled.max_generated_tokens) == (14_000, 4200)
    assert (sampled.mean_prompt_tokens, sampled.max_prompt_tokens, sampled.sampled_rows) == (20.0, 30, 3)
    exact = token_estimate([10, 20, 30], [5, 5, 8], rows=4, exact=True)  # the fourth row is an error row
    assert (exact.prompt_tokens, exact.max_generated_tokens) == (60, 18)
    assert token_estimate([], [], rows=5, exact=False).prompt_tokens == 0


def test_adapters_are_ranked_counted_and_their_problems_all_listed() -> None:
    got = adapter_summary(ADAPTERS, exact=True)
    assert (got.count, got.base_rows, got.max_rank) == (28, 50, 64)
    assert got.ranks == {8: 9, 16: 8, 64: 8}
    assert [entry.rows for entry in got.top] == list(range(34, 14, -1))
    assert [entry.lora_id for entry in got.problems] == ["gone", "broken", "gone too"]
    assert adapter_summary([], exact=True).max_rank == 0


def test_expected_errors_join_adapters_and_rows_by_code() -> None:
    adapters = adapter_summary(ADAPTERS, exact=True)
    got = expected_errors(adapters, {"overlong": 2, "unknown_adapter": 1}, limit=21, allowance="21")
    assert got.by_code == {"bad_adapter": 7, "overlong": 2, "unknown_adapter": 13}
    assert (got.rows, got.stops) == (22, True)
    assert not expected_errors(adapter_summary([], exact=True), {}, limit=0, allowance="none").stops


def test_busiest_leaves_workers_idle_that_a_small_job_does_not_need() -> None:
    names = ["0", "1", "2", "3"]
    used = {
        (samples, pack): placement_summary("cpu", names, samples=samples, max_num_seqs=8, pack=pack).workers_used
        for samples in (3, 9, 100)
        for pack in ("busiest", "spread")
    }
    assert used == {(3, "busiest"): 1, (3, "spread"): 3, (9, "busiest"): 2, (9, "spread"): 4} | {
        (100, "busiest"): 4,
        (100, "spread"): 4,
    }


def test_window_and_parts() -> None:
    assert window_summary(1_000_000, 300).mean_group_rows == 218.5
    assert window_summary(100, 0).mean_group_rows == 100
    assert [parts("x", rows, 10, single_file=False).count for rows in (0, 1, 10, 11)] == [0, 1, 1, 2]


def test_json_is_plain_stable_and_complete() -> None:
    got = make_plan().to_json()
    assert json.loads(json.dumps(got)) == got
    assert list(got) == [
        "schema_version", "model", "inputs", "rows", "samples", "tokens", "adapters", "errors", "placement",
        "memory", "window", "parts", "previews", "warnings", "option_columns",
    ]  # fmt: skip
    assert got["schema_version"] == 1
    assert got["inputs"] == [{"path": "in.parquet", "nbytes": 1234, "rows": 700}]
    assert got["adapters"]["ranks"] == {"8": 9, "16": 8, "64": 8}
    assert got["adapters"]["top"][0] == {"lora_id": "a24", "rows": 34, "rank": 8, "nbytes": 1000, "problem": None}
    assert got["errors"] == {
        "rows": 22, "by_code": {"bad_adapter": 7, "overlong": 2, "unknown_adapter": 13}, "limit": 20, "stops": True,
        "allowance": "20",
    }  # fmt: skip
    assert got["placement"]["workers_used"] == 3
    assert got["memory"]["num_blocks"] == 88  # 22 rows of full length
    assert got["previews"][0]["tokens"] == [{"id": 1, "token": "<s>"}, {"id": 5, "token": "Hi"}]
