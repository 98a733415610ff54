"""What becomes of results: journalled once, digests bound first, counted, and too many errors stop the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from punica_batch.config import JobConfig
from punica_batch.data.journal import Journal
from punica_batch.data.schema import result_schema
from punica_batch.errors import BindingError, JobError, RowError
from punica_batch.job.collector import Collector
from punica_batch.types import Completion, FinishReason, Request, RowResult, SamplingParams


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal", result_schema(JobConfig(), lists=False))
    journal.recover()
    return journal


def make(
    journal: Journal, bound: list[dict[str, str]], *, errors_before: int = 0, max_errors: int | None = 2
) -> Collector:
    def bind(digests: Mapping[str, str]) -> None:
        if "changed" in digests:
            raise BindingError("adapter 'changed' has changed")
        assert not journal.present.count(0, 10) or bound
        bound.append(dict(digests))

    return Collector(
        journal, bind=bind, commit=lambda: None, errors_before=errors_before, max_errors=max_errors,
        allowance="--max-errors 2% of 100 rows allows 2", advice="mend it",
    )  # fmt: skip


def good(row: int, lora_id: str | None, sha256: str | None) -> tuple[Request, RowResult]:
    request = Request(row, np.ones(2, np.int32), lora_id, SamplingParams())
    return request, RowResult(row, 2, (Completion((1, 2, 3), "x", FinishReason.STOP),), adapter_sha256=sha256)


def bad(row: int) -> RowResult:
    return RowResult.failed(row, RowError("null_prompt", "column 'prompt' is null"))


def test_digests_are_bound_once_and_before_their_rows(journal: Journal) -> None:
    bound: list[dict[str, str]] = []
    collector = make(journal, bound)
    collector.add([good(0, "a", "d1"), good(1, None, None)])
    collector.add([good(2, "a", "d1"), good(3, "b", "d2")])
    assert bound == [{"a": "d1"}, {"b": "d2"}]
    with pytest.raises(BindingError):
        collector.add([good(4, "changed", "d3")])
    assert journal.present.count(0, 5) == 4
    assert (collector.rows, collector.prompt_tokens, collector.generated_tokens) == (4, 8, 12)


def test_too_many_errors_stop_the_job_with_all_of_them_kept(journal: Journal, tmp_path: Path) -> None:
    collector = make(journal, [], errors_before=1)
    collector.add_results([bad(3)])
    with pytest.raises(JobError) as stopped:
        collector.add_results([bad(5)])
    assert str(stopped.value) == (
        "3 rows have failed, --max-errors 2% of 100 rows allows 2; row 5: null_prompt: column 'prompt' is null. "
        "What is done is kept: mend it"
    )
    assert collector.errors == {"null_prompt": 2}
    again = Journal(tmp_path / "journal", journal.schema)
    assert again.recover().count(0, 10) == 2


def test_errors_of_earlier_runs_alone_stop_nothing(journal: Journal) -> None:
    """The limit was lowered, or raised and lowered: rows that go well are no reason to stop."""
    collector = make(journal, [], errors_before=5)
    collector.add([good(0, None, None)])
    with pytest.raises(JobError):
        collector.add_results([bad(1)])


def test_any_number_may_fail_without_a_limit(journal: Journal) -> None:
    collector = make(journal, [], max_errors=None)
    collector.add_results([bad(row) for row in range(100)])
    assert collector.rows == collector.errors.total() == 100


def test_an_error_that_ends_by_itself_gets_no_second_end(journal: Journal) -> None:
    collector = make(journal, [], max_errors=0)
    asks = RowResult.failed(0, RowError("unknown_adapter", "the registry has no adapter 'x'; did you mean 'y'?"))
    with pytest.raises(JobError, match=r"did you mean 'y'\? What is done"):
        collector.add_results([asks])
