"""The last steps of an output: one file from its parts, an overwritten output's new generation, ``_SUCCESS``.

Each can be interrupted anywhere and done again: a single file is staged and renamed whole before ``_SUCCESS`` is
written, and its parts are deleted only after that. A new generation (``next/``) is marked complete first; from then on
every start takes the switch up again, in this order: old ``_SUCCESS`` away, new parts or file in place (each replacing
its namesake), surplus old parts away, commits and adapters over the old ones, ``plan.json`` last, ``_SUCCESS``,
``next/`` away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from punica_batch.data.commits import PartInfo, open_commits
from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.layout import Layout
from punica_batch.data.plan import FORMAT, Plan
from punica_batch.data.staged import StagedFile, parquet_writer, staged
from punica_batch.data.store import Store
from punica_batch.errors import BindingError, JobError

COMPLETE = "_COMPLETE"
_PART = re.compile(r"part-\d{5,}\.parquet")
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Success:
    """What ``_SUCCESS`` says. ``errors``: rows by code; ``finish_reasons``: samples by reason; ``files`` in order."""

    rows: int
    parts: int
    error_rows: int
    errors: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    files: list[str] = field(default_factory=list)
    format: int = FORMAT

    @classmethod
    def of(cls, infos: list[PartInfo], target: str | None) -> Success:
        errors: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for info in infos:
            errors.update(info.errors)
            reasons.update(info.finish_reasons)
        return cls(
            rows=sum(info.rows for info in infos),
            parts=len(infos),
            error_rows=sum(errors.values()),
            errors=dict(sorted(errors.items())),
            finish_reasons=dict(sorted(reasons.items())),
            prompt_tokens=sum(info.prompt_tokens for info in infos),
            completion_tokens=sum(info.completion_tokens for info in infos),
            files=[target] if target is not None else [info.name for info in infos],
        )


def all_commits(layout: Layout, plan: Plan, *, repair: bool = False) -> list[PartInfo]:
    """The committed parts of all shards, in order; there may be gaps between shards."""
    shards = (layout.for_shard(index, plan.shards) for index in range(plan.shards))
    return [info for shard in shards for info in open_commits(shard, repair=repair).load()]


def read_success(layout: Layout) -> Success | None:
    """None: not finished. Raises ``BindingError`` when it is damaged."""
    data = layout.store.read(layout.success)
    if data is None:
        return None
    try:
        return Success(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise BindingError(
            f"{layout.store.shown(layout.success)} is damaged: start over with `run --overwrite`"
        ) from error


def write_success(layout: Layout, infos: list[PartInfo]) -> Success:
    success = Success.of(infos, layout.target)
    crashpoint("success.write.before")
    layout.store.write(layout.success, json.dumps(asdict(success), indent=1).encode() + b"\n")
    crashpoint("success.write.after")
    return success


def complete(layout: Layout, infos: list[PartInfo]) -> Success:
    """All parts of ``infos`` are committed: put the output in its place and say so."""
    if layout.target is not None:
        assemble(layout, infos)
    return write_success(layout, infos)


def remove_parts(layout: Layout) -> None:
    """After ``_SUCCESS``: what a single file was made from."""
    if layout.target is not None and layout.store.names(layout.parts.rstrip("/")):
        crashpoint("assemble.delete.before")
        layout.store.remove(layout.parts.rstrip("/"))
        crashpoint("assemble.delete.after")


def assemble(layout: Layout, infos: list[PartInfo]) -> None:
    """Make the single file from its parts, row group by row group, whole or not at all."""
    assert layout.target is not None
    crashpoint("assemble.write.before")
    with staged(layout.staging / f"{layout.target}.tmp", "assemble.write.middle") as sink:
        if layout.jsonl:
            for info in infos:
                _copy(layout.store, layout.parts + info.name, sink)
        else:
            schema = read_schema(layout.store, layout.parts + infos[0].name)
            with parquet_writer(sink, schema) as writer:
                for info in infos:
                    for table in read_groups(layout.store, layout.parts + info.name):
                        writer.write_table(table, row_group_size=max(1, table.num_rows))
    crashpoint("assemble.rename.before")
    layout.store.publish(sink.path, layout.target)
    crashpoint("assemble.rename.after")


def _copy(store: Store, name: str, sink: StagedFile) -> None:
    with store.open(name) as file:
        while data := file.read(_COPY_BYTES):
            sink.write(data)


def read_schema(store: Store, name: str) -> pa.Schema:
    with _opened(store, name) as parquet:
        return parquet.schema_arrow


def read_groups(store: Store, name: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The row groups of a written Parquet file, one chunk a column. Raises ``JobError`` when it is damaged."""
    with _opened(store, name) as parquet:
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, columns, use_threads=False).combine_chunks()


@contextmanager
def _opened(store: Store, name: str) -> Iterator[pq.ParquetFile]:
    try:
        with store.open(name) as file, pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            yield parquet
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise JobError(f"{store.shown(name)} is damaged ({reason}): start over with `run --overwrite`") from error


def mark_complete(layout: Layout) -> None:
    """``layout``: the next generation, all of whose parts are committed. The switch is from now on inevitable."""
    crashpoint("overwrite.switch.before")
    layout.store.write(layout.in_state(COMPLETE), b"")


def switch_generation(layout: Layout) -> Success:
    """Put the complete next generation in the place of ``layout``'s; see above."""
    store, new = layout.store, layout.next_generation()
    data = store.read(new.in_state("plan.json"))
    if data is not None:
        plan = Plan.from_bytes(data, store.shown(new.in_state("plan.json")))
        store.remove(layout.success)
        infos = _commits_anywhere(layout, plan)
        if layout.target is not None:
            assemble(new, infos)
        else:
            _replace_parts(layout, infos)
        _move_state(layout, plan)
    plan = Plan.from_bytes(store.read(layout.in_state("plan.json")) or b"", store.shown(layout.in_state("plan.json")))
    success = write_success(layout, all_commits(layout, plan))
    remove_generation(new)
    crashpoint("overwrite.switch.after")
    return success


def remove_generation(new: Layout) -> None:
    """Delete ``next/``, here and in the work folder; the mark goes with it."""
    new.store.remove(new.state)
    if not new.store.is_local:
        shutil.rmtree(new.local, ignore_errors=True)


def _commits_anywhere(layout: Layout, plan: Plan) -> list[PartInfo]:
    """The new generation's commits, some of which an interrupted switch may have moved already."""
    infos = []
    for index in range(plan.shards):
        if plan.shard_parts(index):
            shard = layout.next_generation().for_shard(index, plan.shards)
            infos += open_commits(shard).load() or open_commits(layout.for_shard(index, plan.shards)).load()
    return infos


def _replace_parts(layout: Layout, infos: list[PartInfo]) -> None:
    store, new = layout.store, layout.next_generation()
    waiting = set(store.names(new.parts.rstrip("/")))
    for info in infos:
        if info.name in waiting:
            crashpoint("overwrite.move.before")
            store.move(new.parts + info.name, info.name)
            crashpoint("overwrite.move.after")
    names = {info.name for info in infos}
    for name in store.names(""):
        if _PART.fullmatch(name) and name not in names:
            crashpoint("overwrite.remove.before")
            store.remove(name)
            crashpoint("overwrite.remove.after")


def _move_state(layout: Layout, plan: Plan) -> None:
    store, new = layout.store, layout.next_generation()
    shards = [layout.for_shard(index, plan.shards) for index in range(plan.shards)]
    kept = {shard.shard.rstrip("/") or "commits" for shard in shards} | {"next", "adapters", "plan.json"}
    for name in store.names(layout.state):
        if name not in kept and not name.startswith(("lock", "lease")):
            store.remove(layout.in_state(name))
    for shard in shards:
        _move_tree(store, new.in_state(f"{shard.shard}commits"), shard.in_shard("commits"))
        _drop_surplus(shard, plan)
        for old in (shard.journal, shard.staging):
            shutil.rmtree(old, ignore_errors=True)
    if (new.local / "adapters").exists():
        os.replace(new.local / "adapters", layout.local / "adapters")
    store.move(new.in_state("plan.json"), layout.in_state("plan.json"))


def _move_tree(store: Store, source: str, target: str) -> None:
    names = store.names(source)
    for name in names:
        _move_tree(store, f"{source}/{name}", f"{target}/{name}")
    if not names and store.size(source) is not None:
        store.move(source, target)


def _drop_surplus(shard: Layout, plan: Plan) -> None:
    """Commit objects of an older plan with more parts."""
    known = {f"{part:08d}.json" for part in range(plan.num_parts)}
    for name in shard.store.names(shard.in_shard("commits")):
        if name not in known:
            shard.store.remove(shard.in_shard(f"commits/{name}"))
