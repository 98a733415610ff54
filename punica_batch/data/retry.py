"""``retry``: the error rows of committed parts once more, in place.

    state = JobState.open(config, binding, source=source, forget_errors=True)
    retry = Retry(state)
    retry.rows                     error rows still to run again
    retry.journal.append(results); retry.journal.maybe_sync()
    retry.apply()                  each part with retried rows is replaced by one rename or put; _SUCCESS is renewed

The retry has a journal of its own, so it can be interrupted and continued; with ``--on-error raise`` the row that
stopped it runs anew. A finished output is retried whole; of an unfinished one only this shard's committed parts are
(its other error rows run with the rest, see ``forget_errors``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from punica_batch.data.commits import PartInfo, open_commits
from punica_batch.data.finish import all_commits, read_groups, read_schema, write_success
from punica_batch.data.journal import Journal
from punica_batch.data.openai_output import REQUEST_COLUMNS, answer_lines
from punica_batch.data.parts import Tally, zip_rows
from punica_batch.data.rowgroups import row_groups
from punica_batch.data.staged import StagedFile, parquet_writer, staged
from punica_batch.data.state import JobState


class Retry:
    """A retry of what ``state`` has committed."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._layout = state.layout
        self._folder = self._layout.local / self._layout.shard / "retry"
        self._finished = state.is_finished
        infos = all_commits(state.base, state.plan) if self._finished else state.parts
        self._infos = sorted(infos, key=lambda info: info.index)
        # A finished single file holds the rows of all parts; else each part is a file.
        whole = self._finished and state.base.target is not None
        self._files = [(state.base.target or "", self._infos)] if whole else [
            (self._layout.parts + info.name, [info]) for info in self._infos
        ]  # fmt: skip
        self.journal = Journal(self._folder, state.result_schema)
        self.journal.recover(forget_errors=state.config.on_error == "raise")

    @property
    def error_rows(self) -> NDArray[np.int64]:
        """int64, ascending: the rows in error in the output as it stands."""
        found = [
            row
            for name, infos in self._files
            if any(info.error_rows for info in infos)
            for row in self._errors_in(name, infos[0].first_row)
        ]
        return np.array(found, dtype=np.int64)

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64, ascending: the error rows that have not been run again yet."""
        errors = self.error_rows
        return errors[~self.journal.present.contains_many(errors)]

    def _errors_in(self, name: str, first_row: int) -> Iterator[int]:
        store = self._state.base.store
        if self._layout.jsonl:
            with store.open(name) as file:
                yield from (row for row, line in enumerate(file, first_row) if json.loads(line)["error"] is not None)
            return
        column = f"{self._state.config.output_prefix}error"
        for table in read_groups(store, name, [column]):
            yield from (first_row + int(row) for row in np.flatnonzero(table[column].is_valid().to_numpy()))
            first_row += table.num_rows

    def apply(self) -> int:
        """Put the retried rows in their parts; returns how many there were. Safe to be interrupted and done again."""
        state = self._state
        self.journal.sync()
        count = len(self.journal.present)
        with state.lock.whole():
            state.lock.check()
            for name, infos in self._files:
                start, stop = infos[0].first_row, infos[-1].first_row + infos[-1].rows
                if self.journal.present.count(start, stop):
                    self._replace(name, infos)
            state.reload_parts()
            if self._finished:
                state.success = write_success(state.base, all_commits(state.base, state.plan))
        self.journal.close()
        shutil.rmtree(self._folder)
        return count

    def _replace(self, name: str, infos: list[PartInfo]) -> None:
        store = self._state.base.store
        tallies = {info.index: Tally() for info in infos}
        staging = self._layout.staging / f"{name.rpartition('/')[2]}.tmp"
        with staged(staging, "part.write.middle") as sink:
            if self._layout.jsonl:
                self._write_lines(sink, name, infos, tallies)
            else:
                schema = read_schema(store, name)
                batches = self._overlaid(name, infos, tallies)
                with parquet_writer(sink, schema) as writer:
                    for part in _by_part(batches, infos):
                        for table in row_groups(part, schema):
                            writer.write_table(table, row_group_size=table.num_rows)
        self._state.source.check_unchanged(infos[0].first_row, infos[-1].first_row + infos[-1].rows)
        store.publish(sink.path, name)
        for info in infos:
            new = _counted(info, tallies[info.index])
            if len(infos) == 1:
                new = replace(new, bytes=sink.size, sha256=sink.sha256)
            if new != info:
                self._commit(new)

    def _commit(self, info: PartInfo) -> None:
        plan = self._state.plan
        index = next(shard for shard in range(plan.shards) if info.index in plan.shard_parts(shard))
        open_commits(replace(self._layout, shard="").for_shard(index, plan.shards)).append(info)

    def _overlaid(self, name: str, infos: list[PartInfo], tallies: dict[int, Tally]) -> Iterator[pa.RecordBatch]:
        """The file's rows, the retried ones replaced; counts each in its part's tally."""
        prefix = self._state.config.output_prefix
        row = infos[0].first_row
        for table in read_groups(self._state.base.store, name):
            here = np.arange(row, row + table.num_rows)
            retried = here[self.journal.present.contains_many(here)]
            if len(retried):
                results = self.journal.pick(retried)
                table = _overlay(table, retried - row, results, prefix)
            self._count(table, row, infos, tallies, prefix)
            yield from table.to_batches()
            row += table.num_rows

    def _count(self, table: pa.Table, row: int, infos: list[PartInfo], tallies: dict[int, Tally], prefix: str) -> None:
        for info in infos:
            start, stop = max(row, info.first_row), min(row + table.num_rows, info.first_row + info.rows)
            if start < stop:
                tallies[info.index].add(table.slice(start - row, stop - start), prefix)

    def _write_lines(self, sink: StagedFile, name: str, infos: list[PartInfo], tallies: dict[int, Tally]) -> None:
        state = self._state
        with state.base.store.open(name) as file:
            for row, line in enumerate(file, infos[0].first_row):
                if row in self.journal.present:
                    results = self.journal.pick(np.array([row])).to_batches()
                    for batch in zip_rows(state.source.batches(row, row + 1, REQUEST_COLUMNS), results):
                        line = answer_lines(batch, row, state.plan.created)
                sink.write(line)
                _count_line(line, tallies[row // state.plan.rows_per_part])


def _by_part(batches: Iterator[pa.RecordBatch], infos: list[PartInfo]) -> Iterator[Iterator[pa.RecordBatch]]:
    """The batches of each part in turn, so that row groups are counted anew in each, as when they were made."""
    left: list[pa.RecordBatch] = []

    def of_part(rows: int) -> Iterator[pa.RecordBatch]:
        while rows:
            batch = left.pop() if left else next(batches)
            if batch.num_rows > rows:
                left.append(batch.slice(rows))
            piece = batch.slice(0, rows)
            rows -= piece.num_rows
            yield piece

    for info in infos:
        yield of_part(info.rows)


def _overlay(table: pa.Table, positions: NDArray[np.int64], results: pa.Table, prefix: str) -> pa.Table:
    """``table`` with ``results`` in the generation columns of the rows at ``positions``."""
    indices = np.arange(table.num_rows)
    indices[positions] = table.num_rows + np.arange(len(positions))
    for name in results.column_names:
        position = table.schema.names.index(prefix + name)
        field = table.schema.field(position)
        old, new = table.column(position), results[name]
        chunks = [*old.chunks, *(chunk.cast(field.type) for chunk in new.chunks)]
        table = table.set_column(position, field, pa.chunked_array(chunks, field.type).take(pa.array(indices)))
    return table


def _count_line(line: bytes, tally: Tally) -> None:
    answer = json.loads(line)
    tally.rows += 1
    if answer["error"] is not None:
        tally.errors[answer["error"]["code"]] += 1
        tally.finish_reasons["error"] += 1
        return
    body = answer["response"]["body"]
    tally.finish_reasons.update(choice["finish_reason"] for choice in body["choices"])
    tally.prompt_tokens += body["usage"]["prompt_tokens"]
    tally.completion_tokens += body["usage"]["completion_tokens"]


def _counted(info: PartInfo, tally: Tally) -> PartInfo:
    return replace(
        info,
        errors=dict(sorted(tally.errors.items())),
        finish_reasons=dict(sorted(tally.finish_reasons.items())),
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
    )
