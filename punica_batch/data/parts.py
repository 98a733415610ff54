"""Parts: what readers see. A part is a fixed range of rows, whoever ran them and in whatever order.

A part is written to staging with fixed row groups and page checksums, fsynced, renamed to its name (or put, once and
whole, in a remote store) and the folder fsynced; only then is it recorded as committed. A crash before that leaves at
most a file that the next run writes again with the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from punica_batch.data.commits import PartInfo
from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.layout import Layout
from punica_batch.data.openai_output import answer_lines
from punica_batch.data.rowgroups import row_groups
from punica_batch.data.staged import StagedFile, parquet_writer, staged
from punica_batch.errors import JobError


@dataclass
class Tally:
    """Counts over results, by code and reason."""

    rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, results: pa.Table, prefix: str = "") -> None:
        """``results`` holds the generation columns, behind ``prefix``."""
        self.rows += results.num_rows
        codes = results[f"{prefix}error"].drop_null().to_pylist()
        self.errors.update(str(error).partition(":")[0] for error in codes)
        reasons = _flat(results[f"{prefix}finish_reason"]).drop_null().value_counts()
        self.finish_reasons.update({item["values"].as_py(): item["counts"].as_py() for item in reasons})
        self.prompt_tokens += pc.sum(results[f"{prefix}prompt_tokens"]).as_py() or 0
        self.completion_tokens += pc.sum(_flat(results[f"{prefix}completion_tokens"])).as_py() or 0


def _flat(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


class PartWriter:
    """Writes the parts of one output. ``schema`` is the output's (of JSON lines: without use), ``created`` seconds."""

    def __init__(self, layout: Layout, schema: pa.Schema, *, num_parts: int, created: int) -> None:
        self.layout = layout
        self._schema = schema
        self._created = created
        self._digits = max(5, len(str(num_parts - 1)))

    def name(self, index: int) -> str:
        return f"part-{index:0{self._digits}d}{self.layout.suffix}"

    def write_part(
        self,
        index: int,
        first_row: int,
        carried: Iterable[pa.RecordBatch] | None,
        results: Iterable[pa.Table],
        adapters: dict[str, str] | None = None,
    ) -> PartInfo:
        """Write part ``index`` from its rows' carried columns (None: none are) and results, both in order.

        The part is in its place when this returns, but not yet committed.

        Raises:
            DiskFull: no room; what was written is removed.
            JobError: the two do not have the same rows, or the disk fails.
        """
        tally = Tally()
        name = self.name(index)
        crashpoint("part.write.before")
        with staged(self.layout.staging / f"{name}.tmp", "part.write.middle") as sink:
            merged = zip_rows(carried, self._counted(results, tally))
            if self.layout.jsonl:
                self._write_lines(sink, first_row, merged)
            else:
                self._write_parquet(sink, merged)
        self.layout.store.publish(sink.path, self.layout.parts + name)
        return PartInfo(
            index=index,
            name=name,
            first_row=first_row,
            rows=tally.rows,
            bytes=sink.size,
            sha256=sink.sha256,
            errors=dict(sorted(tally.errors.items())),
            finish_reasons=dict(sorted(tally.finish_reasons.items())),
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            adapters=adapters or {},
        )

    def _counted(self, results: Iterable[pa.Table], tally: Tally) -> Iterator[pa.RecordBatch]:
        for table in results:
            tally.add(table)
            yield from table.to_batches()

    def _write_parquet(self, sink: StagedFile, merged: Iterable[pa.RecordBatch]) -> None:
        batches = (pa.RecordBatch.from_arrays(batch.columns, schema=self._schema) for batch in merged)
        with parquet_writer(sink, self._schema) as writer:
            for table in row_groups(batches, self._schema):
                writer.write_table(table, row_group_size=table.num_rows)

    def _write_lines(self, sink: StagedFile, first_row: int, merged: Iterable[pa.RecordBatch]) -> None:
        row = first_row
        for batch in merged:
            sink.write(answer_lines(batch, row, self._created))
            row += batch.num_rows


def zip_rows(left: Iterable[pa.RecordBatch] | None, right: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The columns of both, row by row. Raises ``JobError`` when one ends before the other."""
    if left is None:
        yield from right
        return
    lefts, rights = iter(left), iter(right)
    a, b = next(lefts, None), next(rights, None)
    while a is not None and b is not None:
        rows = min(a.num_rows, b.num_rows)
        if rows:
            names = [*a.schema.names, *b.schema.names]
            yield pa.RecordBatch.from_arrays([*a.slice(0, rows).columns, *b.slice(0, rows).columns], names)
        a = a.slice(rows) if rows < a.num_rows else next(lefts, None)
        b = b.slice(rows) if rows < b.num_rows else next(rights, None)
    if a is not None or b is not None:
        raise JobError("a part's rows and results do not match: run the same command again")
