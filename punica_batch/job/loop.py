"""The loop that joins reading, workers and results, until every row is done or the run must stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from punica_batch.config import JobConfig
from punica_batch.data.rowset import RowSet
from punica_batch.data.source import Source
from punica_batch.errors import Interrupted
from punica_batch.job.collector import Collector
from punica_batch.job.eta import Eta
from punica_batch.job.feeder import Feeder
from punica_batch.job.setup import Setup
from punica_batch.job.stop import StopRequest
from punica_batch.planner.window import Window
from punica_batch.progress import Phase, Progress, Snapshot, WorkerLine
from punica_batch.types import RowResult
from punica_batch.workers.dispatch import Dispatcher
from punica_batch.workers.pool import LocalPool, PoolEvent, Worker
from punica_batch.workers.text_pool import TextPool

_POLL_SECONDS = 0.1
_UPDATE_SECONDS = 0.25
_EXIT_SECONDS = 2.0  # of --grace, kept for the journal and the workers' ends


@dataclass(frozen=True)
class Scope:
    """What a run does: the rows ``start:stop`` that are not in ``done``. ``total`` rows are the whole, of which
    ``before`` were done when it began (at ``began`` of the monotonic clock); ``parts``: (done, in all)."""

    start: int
    stop: int
    done: RowSet
    total: int
    before: int
    began: float
    parts: Callable[[], tuple[int, int]]


class Loop:
    def __init__(
        self,
        config: JobConfig,
        source: Source,
        setup: Setup,
        scope: Scope,
        collector: Collector,
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._source = source
        self._setup = setup
        self._scope = scope
        self._collector = collector
        self._progress = progress
        self._stop = stop
        self._eta = Eta()
        self._has_run = False
        self._next_update = 0.0
        self._window = Window(first_row=scope.done.first_missing(scope.start))

    @property
    def rows(self) -> int:
        """Rows that this loop finished."""
        return self._collector.rows

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was noted before the first row: of its adapters and options."""
        return self._setup.found.warnings

    def run(self) -> None:
        """Returns when all rows are journalled. Raises ``Interrupted`` when told to stop, and what workers, stores
        and the collector raise; all that had finished is journalled then, too."""
        with self._stop.polled():
            self._run_workers()

    def _run_workers(self) -> None:
        text = TextPool(self._setup.text, self._setup.text_workers)
        pool: LocalPool | None = None
        try:
            pool = LocalPool(self._setup.workers)
            self._run(pool, text)
        except BaseException:
            self._progress.update(self.snapshot(phase="stopped"))
            raise
        finally:
            text.close()
            if pool is not None:
                pool.close()
            self._collector.sync()

    def _run(self, pool: LocalPool, text: TextPool) -> None:
        dispatcher = Dispatcher(pool, self._window, pack=self._config.pack, note=self._progress.note)
        scope = self._scope
        feeder = Feeder(self._source, text, self._window, scope.done, start=scope.start, stop=scope.stop)
        while scope.before + self._collector.rows < scope.total:
            reason = self._stop.reason
            if reason is not None:
                self._wind_up(pool, dispatcher, reason)
            requests, errors = feeder.pump()
            self._finish(errors)
            dispatcher.add(requests)
            dispatcher.pump(more_to_come=feeder.more_to_come)
            self._take(dispatcher, pool.poll(_POLL_SECONDS, text.connections))
            self._collector.tick()
            self._update(pool)

    def _take(self, dispatcher: Dispatcher, events: list[PoolEvent]) -> None:
        for event in events:
            ended = dispatcher.handle(event)
            self._collector.add(ended)
            self._mark([result for _, result in ended])
            self._eta.add(len(ended), time.monotonic())

    def _finish(self, results: list[RowResult]) -> None:
        self._collector.add_results(results)
        self._mark(results)

    def _mark(self, results: list[RowResult]) -> None:
        for result in results:
            self._window.mark_finished(result.row)

    def _wind_up(self, pool: LocalPool, dispatcher: Dispatcher, reason: str) -> None:
        """Admits nothing more and lets running rows finish while ``--grace`` lasts."""
        deadline = time.monotonic() + max(0.0, self._config.grace - _EXIT_SECONDS)
        dispatcher.close()
        self._next_update = 0.0
        self._stopping(pool, reason, deadline)
        while dispatcher.num_running and time.monotonic() < deadline:
            self._take(dispatcher, pool.poll(_POLL_SECONDS))
            self._collector.tick()
            self._stopping(pool, reason, deadline)
        self._collector.sync()
        done = self._scope.before + self._collector.rows
        raise Interrupted(
            f"stopped by {reason} with {done:,} of {self._scope.total:,} rows done; "
            "run the same command again to continue"
        )

    def _update(self, pool: LocalPool) -> None:
        if not self._has_run and any(worker.capacity for worker in pool.workers):
            self._has_run = True
            self._next_update = 0.0  # a phase is shown however short it is
        if self._is_time():
            self._progress.update(self.snapshot(pool.workers, "running" if self._has_run else "starting"))

    def _stopping(self, pool: LocalPool, reason: str, deadline: float) -> None:
        if self._is_time():
            left = max(0.0, deadline - time.monotonic())
            now = self.snapshot(pool.workers, "stopping")
            self._progress.update(replace(now, stop_reason=reason, grace_s=left))

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now < self._next_update:
            return False
        self._next_update = now + _UPDATE_SECONDS
        return True

    def snapshot(self, workers: Sequence[Worker] = (), phase: Phase = "running") -> Snapshot:
        """The run as it is now. Without ``workers`` the tokens are those of finished rows, the rate that of the whole
        run."""
        scope, collector = self._scope, self._collector
        done = scope.before + collector.rows
        now = time.monotonic()
        parts_done, parts_total = scope.parts()
        generated = sum(w.generated_tokens for w in workers) if workers else collector.generated_tokens
        mean = generated / max(now - scope.began, 1e-9)
        return Snapshot(
            rows_total=scope.total,
            rows_done=done,
            rows_before=scope.before,
            rows_error=collector.errors.total(),
            errors_by_code=dict(collector.errors),
            parts_done=parts_done,
            parts_total=parts_total,
            prompt_tokens=sum(w.prompt_tokens for w in workers) if workers else collector.prompt_tokens,
            generated_tokens=generated,
            tokens_per_s=sum(w.tokens_per_s for w in workers) if workers else mean,
            mean_tokens_per_s=mean,
            eta_s=self._eta.seconds(scope.total - done, now) if phase == "running" else None,
            elapsed_s=now - scope.began,
            phase=phase,
            workers=tuple(WorkerLine(w.name, w.state, w.stats, w.tokens_per_s, w.max_num_seqs) for w in workers),
        )
