"""Takes results: journals them, has parts committed, counts, and stops the job when too many rows fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from punica_batch.data.journal import Journal
from punica_batch.errors import JobError, ended
from punica_batch.types import Request, RowResult


class Collector:
    """``bind`` records an adapter's digest before the first row that it answered is journalled; ``commit`` writes at
    most one part that is ready. ``max_errors``: rows that may fail, those of earlier runs (``errors_before``)
    included; None: any number. ``allowance`` says in words how many that is and why; ``advice`` what to do when more
    have failed."""

    def __init__(
        self,
        journal: Journal,
        *,
        bind: Callable[[Mapping[str, str]], None],
        commit: Callable[[], object],
        errors_before: int,
        max_errors: int | None,
        allowance: str,
        advice: str,
    ) -> None:
        self._journal = journal
        self._bind = bind
        self._commit = commit
        self._errors_before = errors_before
        self._max_errors = max_errors
        self._allowance = allowance
        self._advice = advice
        self._digests: dict[str, str] = {}
        self.rows = 0
        self.errors: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def add(self, ended: Iterable[tuple[Request, RowResult]]) -> None:
        """Rows that came back from workers. Raises ``BindingError`` when an adapter is not what it was."""
        pairs = list(ended)
        digests = {q.lora_id: r.adapter_sha256 for q, r in pairs if q.lora_id is not None and r.adapter_sha256}
        new = {name: digest for name, digest in digests.items() if self._digests.get(name) != digest}
        if new:
            self._bind(new)
            self._digests.update(new)
        self.add_results([result for _, result in pairs])

    def add_results(self, results: list[RowResult]) -> None:
        """Rows that ended, failed ones too. Raises ``JobError`` when more have failed than may."""
        if not results:
            return
        self._journal.append(results)
        self.rows += len(results)
        for result in results:
            if result.error is not None:
                self.errors[result.error.partition(":")[0]] += 1
            else:
                self.prompt_tokens += result.prompt_tokens or 0
                self.generated_tokens += sum(len(c.token_ids) for c in result.completions)
        self._check_errors(results)

    def _check_errors(self, results: list[RowResult]) -> None:
        failed = self._errors_before + self.errors.total()
        if self._max_errors is None or failed <= self._max_errors:
            return
        last = next((r for r in reversed(results) if r.error is not None), None)
        if last is None:
            return
        self._journal.sync()
        rows = "1 row has" if failed == 1 else f"{failed:,} rows have"
        raise JobError(
            f"{rows} failed, {self._allowance}; row {last.row}: {ended(str(last.error))} "
            f"What is done is kept: {self._advice}"
        )

    def tick(self) -> None:
        """Call often: makes rows durable within seconds, and writes a part when its rows are all there."""
        self._journal.maybe_sync()
        self._commit()

    def sync(self) -> None:
        self._journal.sync()
