"""Which generation of an output a run works in: what was begun and fits, a new one, or none at all."""

from __future__ import annotations

import re

from punica_batch.data.commits import open_commits
from punica_batch.data.crashpoints import crashpoint
from punica_batch.data.finish import COMPLETE, remove_generation, switch_generation
from punica_batch.data.layout import Layout
from punica_batch.data.plan import Plan
from punica_batch.errors import BindingError

_PART_NAME = re.compile(r"part-\d{5,}\.parquet")


def choose_generation(base: Layout, plan: Plan, *, overwrite: bool) -> tuple[Layout, Plan]:
    """The generation to work in and its plan, written if it is new. Only under ``OutputLock.whole``.

    A switch that was interrupted is completed first; when it was this plan's, that is the end of it. ``next/`` goes on
    when it is of the same plan, with ``overwrite`` said again or not; of another plan it is begun anew. ``overwrite``
    works there even when there is nothing to replace, so that the same command finds what it has begun.
    A plan under which nothing was done is replaced. Raises ``BindingError`` saying what has changed.
    """
    new = base.next_generation()
    was_complete = base.store.read(new.in_state(COMPLETE)) is not None
    if was_complete:
        switch_generation(base)
    waiting, current = _read_plan(new), _read_plan(base)
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
            "Give the old values, another -o, or start over with --overwrite"
        )
    return base, current


def _read_plan(layout: Layout) -> Plan | None:
    data = layout.store.read(layout.in_state("plan.json"))
    return None if data is None else Plan.from_bytes(data, layout.store.shown(layout.in_state("plan.json")))


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
