"""``JobState``: what is done of an output, and the steps that make it more.

    state = JobState.open(config, binding, source=source)    takes the lock; creates or checks the plan
    state.is_finished                                        nothing to do: exit 0
    state.bind_adapters({name: sha256})                      before rows of these adapters are journalled
    state.journal.append(results); state.journal.maybe_sync()
    state.commit_ready()                                     writes and commits the parts whose rows are all there
    state.finish()                                           after the last part: assembles, writes _SUCCESS
    state.close()

Everything here is done by the parent process alone. See ``layout`` for what lies where.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import TracebackType

import pyarrow as pa

from punica_batch.config import JobConfig
from punica_batch.data.commits import PartInfo, open_commits
from punica_batch.data.finish import (
    Success,
    all_commits,
    complete,
    mark_complete,
    read_success,
    remove_parts,
    switch_generation,
)
from punica_batch.data.generation import choose_generation
from punica_batch.data.journal import Journal
from punica_batch.data.layout import Layout
from punica_batch.data.ledger import AdapterLedger
from punica_batch.data.lock import OutputLock
from punica_batch.data.openai_output import REQUEST_COLUMNS
from punica_batch.data.parts import PartWriter
from punica_batch.data.plan import Plan
from punica_batch.data.rowset import RowSet
from punica_batch.data.schema import carried_schema, output_schema, result_schema
from punica_batch.data.source import Source
from punica_batch.errors import BindingError, JobError, UsageError
from punica_batch.types import JsonDict

_THREADS = 16


def finished_binding(config: JobConfig) -> JsonDict | None:
    """What bound the output of ``config``, if it is finished; no lock is taken."""
    layout = Layout.of(config)
    data = layout.store.read(layout.in_state("plan.json")) if read_success(layout) is not None else None
    return None if data is None else Plan.from_bytes(data, layout.shown).binding


class JobState:
    """One run's hold on its output (or its ``--shard I/N``): rows ``first_row`` to ``stop_row - 1``."""

    def __init__(
        self, config: JobConfig, source: Source, base: Layout, active: Layout, plan: Plan, lock: OutputLock, *,
        forget_errors: bool = False,
    ) -> None:  # fmt: skip
        self.config = config
        self.source = source
        self.base = base
        self.plan = plan
        self.lock = lock
        index, count = config.shard_of
        self.layout = active.for_shard(index, count)
        self.schema = output_schema(source.schema, config, lists=source.lists)
        self.result_schema = result_schema(config, lists=source.lists)
        self.shard_parts = plan.shard_parts(index)
        self.first_row, self.stop_row = _row_range(plan, self.shard_parts)
        self._forget_errors = forget_errors
        self._commits = open_commits(self.layout)
        self.parts: list[PartInfo] = self._commits.load()
        self.success = read_success(base) if active == base else None
        self._writer = PartWriter(self.layout, self.schema, num_parts=plan.num_parts, created=plan.created)
        remote = not self.layout.store.is_local
        known = all_commits(active, plan) if remote else []
        self._ledger = AdapterLedger(active.local / "adapters", known, remote=remote)
        if self.success is not None:
            self._tidy()
        self._check_parts()

    @classmethod
    def open(
        cls,
        config: JobConfig,
        binding: JsonDict,
        *,
        source: Source,
        forget_errors: bool = False,
        is_retry: bool = False,
    ) -> JobState:
        """Take the output's lock and open its state, or begin it.

        ``binding``: digests of model, tokenizer, templates and whatever else decides the result; the config's own
        values and the input files are added here. ``forget_errors``: rows journalled as errors but not yet in a part
        run again (for ``retry``). ``is_retry``: which command to advise where the output is of something else.

        Raises:
            OutputLocked: another run holds the output.
            BindingError: the output was made from something else, named in the message, or is not this program's.
            UsageError: a remote output without ``--work-dir``, or in a store that cannot create exclusively.
        """
        base = Layout.of(config)
        if base.jsonl and source.kind != "openai":
            raise UsageError("a .jsonl output needs OpenAI batch input: name the output .parquet")
        plan = Plan.of(config, binding, source)
        lock = OutputLock(base, *config.shard_of)
        try:
            with lock.whole():
                active, plan = choose_generation(base, plan, overwrite=config.overwrite, is_retry=is_retry)
            return cls(config, source, base, active, plan, lock, forget_errors=forget_errors)
        except BaseException:
            lock.release()
            raise

    def _check_parts(self) -> None:
        """What the commits name must be there as it was: it is what the rows not run again are in. Of a finished single
        file no size is known, of a remote finished folder none is asked for."""
        store = self.layout.store
        folder, infos, names = self.layout.parts, self.parts, [info.name for info in self.parts]
        if self.success is not None:
            has_sizes = self.base.target is None and store.is_local
            folder, infos, names = "", all_commits(self.base, self.plan) if has_sizes else [], self.success.files
        present = set(store.names(folder.rstrip("/")))
        gone = next((name for name in names if name not in present), None)
        if gone is not None:
            raise BindingError(
                f"{store.shown(folder + gone)} is gone, though finished: bring it back, or start over with "
                "`run --overwrite`"
            )
        # An interrupted retry may have replaced a part and not yet said so.
        if any(any(self.base.local.glob(pattern)) for pattern in ("retry", "*/retry")):
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            sizes = list(pool.map(lambda info: store.size(folder + info.name), infos))
        for info, size in zip(infos, sizes, strict=True):
            if size != info.bytes:
                raise BindingError(
                    f"{store.shown(folder + info.name)} has {size} bytes, not the {info.bytes} that were written: "
                    "bring the old file back, or start over with `run --overwrite`"
                )

    def reload_parts(self) -> None:
        """After a retry has replaced some."""
        self.parts = self._commits.load()

    @property
    def is_finished(self) -> bool:
        """The whole output is done, all shards of it."""
        return self.success is not None

    @property
    def committed(self) -> int:
        """How many of ``shard_parts`` are committed, in order."""
        return len(self.parts)

    @property
    def next_row(self) -> int:
        """The first row that is in no committed part."""
        return self.parts[-1].first_row + self.parts[-1].rows if self.parts else self.first_row

    @property
    def is_committed(self) -> bool:
        """All parts of this shard are committed; ``finish`` may be called."""
        return len(self.parts) == len(self.shard_parts)

    @cached_property
    def journal(self) -> Journal:
        """The journal, recovered."""
        journal = Journal(self.layout.journal, self.result_schema)
        journal.recover(forget_errors=self._forget_errors)
        journal.discard_below(self.next_row)
        shutil.rmtree(self.layout.staging, ignore_errors=True)
        return journal

    @cached_property
    def done(self) -> RowSet:
        """Rows of this shard that were done when it was opened, in parts or in the journal."""
        rows = RowSet()
        rows.add_range(self.first_row, self.next_row)
        if not self.is_committed:
            rows.add_many(list(self.journal.present))
        return rows

    @property
    def error_rows(self) -> int:
        """Rows in error so far, in parts and in the journal."""
        waiting = 0 if self.is_committed else self.journal.failed.count(self.next_row, self.stop_row)
        return sum(info.error_rows for info in self.parts) + waiting

    @property
    def adapter_digests(self) -> dict[str, str]:
        """What was bound, by name."""
        return self._ledger.digests

    def bind_adapter(self, name: str, sha256: str, *, rebind: bool = False) -> None:
        self.bind_adapters({name: sha256}, rebind=rebind)

    def bind_adapters(self, digests: Mapping[str, str], *, rebind: bool = False) -> None:
        """Record what each adapter's content is, durably. ``rebind`` accepts changed ones (for ``retry``).

        Raises ``BindingError`` naming an adapter that has changed since its first rows ran.
        """
        self._ledger.bind(digests, rebind=rebind)

    def commit_ready(self, limit: int | None = None) -> list[PartInfo]:
        """Write and commit, in order, the parts whose rows are all journalled; at most ``limit`` of them.

        Raises ``DiskFull``, ``StoreAway``, ``OutputLocked`` (a lease was lost) or ``JobError`` (an input has changed).
        """
        made: list[PartInfo] = []
        while not self.is_committed and (limit is None or len(made) < limit):
            rows = self.plan.part_rows(self.shard_parts[len(self.parts)])
            if self.journal.present.count(rows.start, rows.stop) < len(rows):
                break
            made.append(self._commit(rows))
        return made

    def _commit(self, rows: range) -> PartInfo:
        self.lock.check()
        info = self._writer.write_part(
            self.shard_parts[len(self.parts)],
            rows.start,
            self._carried(rows),
            self.journal.iter_rows(rows.start, rows.stop),
            self._ledger.new_for_commit(),
        )
        self.source.check_unchanged(rows.start, rows.stop)
        self._commits.append(info)
        self._ledger.committed(info)
        self.parts.append(info)
        self.journal.discard_below(rows.stop)
        return info

    def _carried(self, rows: range) -> Iterator[pa.RecordBatch] | None:
        names = REQUEST_COLUMNS if self.layout.jsonl else carried_schema(self.source.schema, self.config).names
        return self.source.batches(rows.start, rows.stop, names) if names else None

    def finish(self) -> Success | None:
        """After the last part: complete the output, or return None while other shards are still at work.

        Raises ``JobError`` when parts of this shard are missing.
        """
        if not self.is_committed:
            raise JobError(f"row {self.next_row} is not done: run the same command again")
        if self.success is not None:
            return self.success
        if "journal" in self.__dict__:
            self.journal.close()
        active = self.base if self.layout.state == self.base.state else self.base.next_generation()
        with self.lock.whole():
            done = read_success(self.base) if active == self.base else None
            infos = all_commits(active, self.plan)
            if done is None and len(infos) < self.plan.num_parts:
                return None
            self.lock.check()
            if done is not None:
                self.success = done
            elif active == self.base:
                self.success = complete(self.base, infos)
            else:
                mark_complete(active)
                self.success = switch_generation(self.base)
        self._tidy()
        return self.success

    def _tidy(self) -> None:
        """Delete what a finished output no longer needs."""
        remove_parts(self.base)
        shutil.rmtree(self.layout.journal, ignore_errors=True)
        shutil.rmtree(self.layout.staging, ignore_errors=True)

    def close(self) -> None:
        """Make everything durable and let the output go."""
        try:
            if "journal" in self.__dict__ and not self.is_finished:
                self.journal.close()
        finally:
            self.lock.release()

    def __enter__(self) -> JobState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _row_range(plan: Plan, parts: range) -> tuple[int, int]:
    if not parts:
        return 0, 0
    return plan.part_rows(parts[0]).start, plan.part_rows(parts[-1]).stop
