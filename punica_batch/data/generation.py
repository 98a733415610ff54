"""Which generation of an output a run works in: what was begun and fits, a new one, or none at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from punica_batch.data.commits import open_commits
from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.finish import COMPLETE, remove_generation, switch_generation
from punica_batch.data.layout import Layout
from punica_batch.data.paths import PARQUET_SUFFIXES
from punica_batch.data.plan import Plan
from punica_batch.data.store import Store
from punica_batch.errors import BindingError

_DEPTH = 4  # of folders looked into: links may lead round in circles
# What to do when a plan does not fit: ``run`` has more ways out than ``retry``.
_RUN_ADVICE = "Give the old values, another -o, or start over with --overwrite"
_RETRY_ADVICE = "A retry needs them as they were: bring them back, or start over with `run --overwrite`"
_PART_NAME = re.compile(r"part-\d{5,}\.parquet")


def choose_generation(base: Layout, plan: Plan, *, overwrite: bool, is_retry: bool = False) -> tuple[Layout, Plan]:
    """The generation to work in and its plan, written if it is new. Only under ``OutputLock.whole``.

    A switch that was interrupted is completed first; when it was this plan's, that is the end of it. ``next/`` goes on
    when it is of the same plan, with ``overwrite`` said again or not; of another plan it is begun anew. ``overwrite``
    works there even when there is nothing to replace, so that the same command finds what it has begun.
    A plan under which nothing was done is replaced. Raises ``BindingError`` saying what has changed, or naming a
    Parquet file in the output's folder that no run would have put there: readers would take its rows for the output's.
    """
    new = base.next_generation()
    was_complete = base.store.read(new.in_state(COMPLETE)) is not None
    if was_complete:
        switch_generation(base)
    foreign = None if base.target is not None else next(_foreign(base.store), None)
    if foreign is not None:
        raise BindingError(
            f"{base.store.shown(foreign)} would be read as part of the output: move it away, or give another folder"
        )
    waiting, current = _read_plan(new, overwrite=overwrite), _read_plan(base, overwrite=overwrite)
    if was_complete and current is not None and not current.changes(plan):
        return base, current
    if waiting is not None and not waiting.changes(plan):
        return new, waiting
    if waiting is None or overwrite:
        remove_generation(new)
    if overwrite:
        return new, _begin(new, plan)
    if current is None:
        if _has_output(base):
            raise BindingError(f"{base.shown} is there, but not of this program's making: --overwrite replaces it")
        return base, _begin(base, plan)
    changes = current.changes(plan)
    if changes and _is_untouched(base, current):
        return base, _begin(base, plan)
    if changes:
        raise BindingError(
            f"{base.shown} was begun with something else: {'; '.join(changes[:5])}. "
            f"{_RETRY_ADVICE if is_retry else _RUN_ADVICE}"
        )
    return base, current


def _read_plan(layout: Layout, *, overwrite: bool) -> Plan | None:
    """None when there is none, or one that cannot be read and need not be, to be overwritten."""
    data = layout.store.read(layout.in_state("plan.json"))
    try:
        return None if data is None else Plan.from_bytes(data, layout.store.shown(layout.in_state("plan.json")))
    except BindingError:
        if overwrite:
            return None
        raise


def _foreign(store: Store, folder: str = "") -> Iterator[str]:
    """Parquet files in the output's folder and those below that no run would have put there."""
    names = [name for name in store.names(folder) if not name.startswith((".", "_"))]
    for name in names:
        if name.endswith(PARQUET_SUFFIXES) and (folder or not _PART_NAME.fullmatch(name)):
            yield f"{folder}/{name}".lstrip("/")
    for name in names:
        if not PurePosixPath(name).suffix and folder.count("/") < _DEPTH:
            yield from _foreign(store, f"{folder}/{name}".lstrip("/"))


def _begin(layout: Layout, plan: Plan) -> Plan:
    crashpoint("plan.write.before")
    layout.store.write(layout.in_state("plan.json"), plan.to_bytes())
    crashpoint("plan.write.after")
    return plan


def _is_untouched(layout: Layout, plan: Plan) -> bool:
    """No row was done under this plan: a run that was refused before any work binds nothing."""
    shards = [layout.for_shard(index, plan.shards) for index in range(plan.shards)]
    return not any(any(shard.journal.glob("*.seg")) or open_commits(shard, repair=False).load() for shard in shards)


def _has_output(base: Layout) -> bool:
    names = base.store.names("")
    if base.target is not None:
        return base.target in names
    return any(_PART_NAME.fullmatch(name) for name in names)
