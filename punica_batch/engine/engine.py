"""One worker's engine: requests in, finished rows out. ``Engine.step`` is the architecture in ten lines."""

from __future__ import annotations

from collections import deque

import torch

from punica_batch.engine.lora_store import LoraStore
from punica_batch.engine.model_runner import ModelRunner, PendingStep
from punica_batch.engine.rows import Endings, RowState
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import JobError, RowError, UnknownAdapters
from punica_batch.scheduler.batch import build_arrays
from punica_batch.scheduler.scheduler import ScheduledBatch, Scheduler, SchedulerConfig
from punica_batch.scheduler.sequence import Sequence
from punica_batch.types import Request, RowResult, WorkerStats

# How long a step that finds nothing but loading adapters waits for one, seconds.
_LOADING_WAIT = 0.02


class Engine:
    """Continuous batching over one model on one device.

    ``add`` rows at any time and call ``step`` while ``has_work``: it answers the rows that have ended, each once,
    failed ones too. A row's failure (too long, bad adapter, NaN) never raises; ``StoreAway`` does, when adapter files
    cannot be had. Not for use by several threads.

    ``steps_ahead`` (0 or 1) steps are enqueued before the outcome of the one before is looked at, so that a device
    never waits for the host: the ids it sampled stay there for the next step, a row that ends by its length takes no
    part in it, and what a row that ends by a stop computes too much is dropped.
    """

    def __init__(
        self,
        runner: ModelRunner,
        lora_store: LoraStore,
        endings: Endings,
        settings: EngineSettings,
        *,
        steps_ahead: int = 0,
    ) -> None:
        self.runner = runner
        self.lora_store = lora_store
        self.settings = settings
        self._endings = endings
        self._unknown_adapters = UnknownAdapters()
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=settings.num_blocks, block_size=settings.block_size, max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens, max_model_len=settings.max_model_len,
                max_loras=settings.max_loras, age_bound=settings.age_bound,
            ),
            lora_store,
        )  # fmt: skip
        self._steps_ahead = steps_ahead
        self._has_scheduled = False  # a batch, in the last turn: all of it may have ended with its step
        self._under_way: deque[tuple[list[Sequence], PendingStep]] = deque()  # steps enqueued and not yet collected
        self._rows: dict[int, RowState] = {}
        self._results: list[RowResult] = []
        self._prompt_tokens = self._generated_tokens = self._preemptions = self._steps = 0

    def warm_up(self) -> None:
        """Does before the first step what would hold up later ones: compiles kernels, records graphs."""
        self.runner.warm_up()

    def add(self, request: Request) -> None:
        """Takes a row, whose number must not be in work. One that can never run fails in the next ``step``."""
        if request.row in self._rows:
            raise ValueError(f"row {request.row} is in work already")
        error = self._refusal(request)
        if error is not None:
            self._results.append(RowResult.failed(request.row, error, request.num_prompt_tokens))
            return
        row = RowState(request, self._endings)
        self._rows[request.row] = row
        for sample in row.samples:
            self._scheduler.add(sample.sequence)
        if request.lora_id is not None:
            self.lora_store.prefetch([request.lora_id])

    def step(self) -> list[RowResult]:
        """Enqueues a step of the batch. Answers the rows (all samples) that have been found to end since the last
        call: with ``steps_ahead``, those of the step before."""
        waited_for = self._scheduler.waited_for
        self._fail_rows_of(self.lora_store.poll(rows_run=self._has_scheduled, waited_for=waited_for))
        batch = self._scheduler.schedule()
        self._has_scheduled = batch is not None
        if batch is not None:
            self._enqueue(batch)
        elif not self._under_way:
            return self._idle()
        if self._under_way and (batch is None or len(self._under_way) > self._steps_ahead):
            self._collect(*self._under_way.popleft())
        return self._take_results()

    def take_back(self, count: int) -> list[Request]:
        """Gives up to ``count`` rows that have not started, the newest first; they are no longer this engine's."""
        rows = dict.fromkeys(sequence.request.row for sequence in self._scheduler.take_back(count))
        return [self._rows.pop(row).request for row in rows]

    def abort(self, row: int) -> None:
        """Drops a row in work; it will have no result. Nothing happens if it is not in work."""
        state = self._rows.pop(row, None)
        if state is not None:
            for sample in state.samples:
                self._scheduler.abort(sample.sequence)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to answer."""
        return bool(self._rows or self._results)

    def stats(self) -> WorkerStats:
        pool = self._scheduler.pool
        return WorkerStats(
            running=self._scheduler.num_running, waiting=self._scheduler.num_waiting,
            kv_blocks_used=pool.num_blocks - pool.num_free, kv_blocks_total=pool.num_blocks,
            adapters_resident=len(self.lora_store.resident),
            prompt_tokens=self._prompt_tokens, generated_tokens=self._generated_tokens,
            preemptions=self._preemptions, steps=self._steps,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Asserts what must hold between steps. For tests and debugging."""
        self._scheduler.check_integrity()
        self.lora_store.check_integrity()
        in_work = {s.request.row for s in (*self._scheduler.running, *self._scheduler.waiting)}
        ending = {s.request.row for sequences, _ in self._under_way for s in sequences}
        assert in_work <= set(self._rows) <= in_work | ending
        assert len(self._under_way) <= self._steps_ahead

    def close(self) -> None:
        """Ends the loading threads."""
        self.lora_store.close()

    # -- private --

    def _refusal(self, request: Request) -> RowError | None:
        """Why a row can never run here."""
        length, lora_id = request.num_prompt_tokens, request.lora_id
        if length == 0:
            return RowError("empty_prompt", "the prompt has no tokens")
        if length >= self.settings.max_model_len:
            return RowError(
                "prompt_too_long", f"the prompt has {length} tokens; max_model_len is {self.settings.max_model_len}"
            )
        if not self._scheduler.fits(request):
            room = self.settings.num_blocks * self.settings.block_size
            return RowError("kv_too_small", f"prompt and max_tokens need more than the KV cache's {room} tokens")
        if lora_id is None:
            return None
        if lora_id not in self.settings.adapters:
            return self._unknown_adapters.error(lora_id, self.settings.adapters.keys())
        return self.lora_store.failures.get(lora_id)

    def _fail_rows_of(self, lora_ids: list[str]) -> None:
        """Ends the rows of adapters that turned out unusable. None of them runs: the adapter never was in a slot, or
        was evicted, which no running row allows."""
        for lora_id in lora_ids:
            for request in [row.request for row in self._rows.values() if row.request.lora_id == lora_id]:
                self._fail(request, self.lora_store.failures[lora_id])

    def _idle(self) -> list[RowResult]:
        if self._rows and not self._results:
            self.lora_store.wait(_LOADING_WAIT)
        return self._take_results()

    def _enqueue(self, batch: ScheduledBatch) -> None:
        """Starts a step, and ends what has its full length with it: the next one is planned without."""
        try:
            pending = self.runner.execute(build_arrays(batch, self.settings.block_size))
        except torch.OutOfMemoryError as error:
            self._take_smaller_steps(batch.num_tokens, error)
            return
        self._under_way.append((batch.sampled, pending))
        self._scheduler.advance(batch)
        self._steps += 1
        self._preemptions += len(batch.preempted)
        self._prompt_tokens += batch.num_tokens - len(batch.decodes)
        for sequence in batch.sampled:
            if self._rows[sequence.request.row].ends_by_length(sequence):
                self._scheduler.finish(sequence)

    def _take_smaller_steps(self, num_tokens: int, error: torch.OutOfMemoryError) -> None:
        """After a step of ``num_tokens`` rows that did not fit: it is planned anew, with half of them at most, at the
        last with half of the sequences."""
        # The next plan may take up what this one preempted, whose tokens must be known by then; and as there is no
        # step between, it would overwrite what the step under way was planned with.
        while self._under_way:
            self._collect(*self._under_way.popleft())
        scheduler = self._scheduler
        if scheduler.max_num_batched_tokens > scheduler.max_num_seqs:
            scheduler.max_num_batched_tokens = max(num_tokens // 2, scheduler.max_num_seqs)
        elif scheduler.max_num_seqs > 1:
            scheduler.max_num_seqs //= 2
            scheduler.max_num_batched_tokens = scheduler.max_num_seqs
            scheduler.preempt(scheduler.max_num_seqs)
        else:
            raise JobError(
                "the GPU's memory does not hold a step of one sequence: free it, or lower --gpu-memory-utilization"
            ) from error
        torch.cuda.empty_cache()

    def _collect(self, sequences: list[Sequence], pending: PendingStep) -> None:
        """Waits for a step, tells the rows of their tokens and takes those that ended with them out of the batch."""
        sampled = self.runner.collect(pending)
        for i, sequence in enumerate(sequences):
            row = self._rows.get(sequence.request.row)
            # it may have ended: aborted, failed, or by a token that was not known when this step was planned
            if row is None or not row.awaits(sequence):
                continue
            if not sampled.finite[i]:
                self._fail(row.request, RowError("nan_logits", "the model computed NaN or Inf for this row"))
                continue
            self._generated_tokens += 1
            if i in sampled.logprobs:
                row.add_logprobs(sequence, *sampled.logprobs[i])
            if row.push(sequence, sampled.token_ids[i]):
                self._scheduler.abort(sequence)
                if row.is_done:
                    del self._rows[row.request.row]
                    self._results.append(row.result(self.lora_store.sha256(row.request.lora_id)))

    def _fail(self, request: Request, error: RowError) -> None:
        self.abort(request.row)
        self._results.append(RowResult.failed(request.row, error, request.num_prompt_tokens))

    def _take_results(self) -> list[RowResult]:
        results, self._results = self._results, []
        return results
