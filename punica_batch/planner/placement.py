"""Which worker runs a row: Punica's busiest-GPU rule (arXiv 2310.18547, section 5.1), with adapter affinity.

Pure functions of what the parent knows; the parent applies the answers and asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Pack = Literal["busiest", "spread"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the parent sees it. Rows count as sequences: a row with n samples counts n.

    ``running`` rows are computed now, ``backlog`` rows were sent but have not started; together they are its working
    set. ``free_blocks`` are KV blocks neither in use nor promised to the backlog. ``rows_by_adapter`` counts the
    working set (None: base model). A worker that is not ``active`` was released, or is dead: it gets nothing.
    ``name``: a GPU's UUID, a CPU worker's zero-padded number.
    """

    name: str
    running: int
    backlog: int
    free_blocks: int
    max_num_seqs: int
    rows_by_adapter: Mapping[str | None, int] = field(default_factory=dict)
    active: bool = True

    @property
    def working_set(self) -> int:
        return self.running + self.backlog

    @property
    def free_places(self) -> int:
        return max(self.max_num_seqs - self.working_set, 0)


def place(
    workers: Iterable[WorkerView], lora_id: str | None, blocks: int, *, rows: int = 1, pack: Pack = "busiest"
) -> str | None:
    """The worker for ``rows`` new rows of one adapter that need ``blocks`` KV blocks together, or None.

    Among active workers that stay within their batch cap and have the blocks free: largest working set, then most
    rows of the same adapter, then fewest free blocks, then highest name. ``spread`` starts with the smallest working
    set instead. An empty worker takes anything, or a row with more samples than a batch has places could never run.
    None: nothing can take them now, and nothing behind them may go ahead (first come, first served).
    """
    sign = 1 if pack == "busiest" else -1
    able = [
        w for w in workers if w.active and (w.working_set == 0 or (w.free_places >= rows and w.free_blocks >= blocks))
    ]
    best = max(
        able,
        key=lambda w: (sign * w.working_set, w.rows_by_adapter.get(lora_id, 0), -w.free_blocks, w.name),
        default=None,
    )
    return best.name if best else None


def place_backlog(
    workers: Iterable[WorkerView], lora_id: str | None, *, rows: int = 1, lookahead: int | None = None
) -> str | None:
    """The worker whose backlog takes rows that ``place`` could place nowhere, or None when all backlogs are full.

    So a batch is refilled the moment a row ends instead of when the parent has heard of it. A backlog holds at most
    ``lookahead`` rows (default: one full batch). Shortest backlog first, then most rows of the same adapter, then
    highest name.
    """
    able = [w for w in workers if w.active and w.backlog + rows <= (w.max_num_seqs if lookahead is None else lookahead)]
    best = max(able, key=lambda w: (-w.backlog, w.rows_by_adapter.get(lora_id, 0), w.name), default=None)
    return best.name if best else None


@dataclass(frozen=True, slots=True)
class Steal:
    """``count`` rows that have not started move from ``victim`` to ``thief`` (names)."""

    victim: str
    thief: str
    count: int


def steal(workers: Sequence[WorkerView]) -> Steal | None:
    """What a worker with free places may take from the longest backlog once the parent has nothing left to place.

    Only while all backlogs together exceed the thief's full batch, and only what exceeds it: below that the thief
    drains and is released. The thief has no backlog itself and is chosen as ``place`` chooses.
    """
    active = [w for w in workers if w.active]
    thieves = [w for w in active if w.backlog == 0 and w.free_places and w.free_blocks]
    victim = max(active, key=lambda w: (w.backlog, w.name), default=None)
    if not thieves or victim is None:
        return None
    thief = max(thieves, key=lambda w: (w.working_set, -w.free_blocks, w.name))
    excess = sum(w.backlog for w in active) - thief.max_num_seqs
    count = min(thief.free_places, victim.backlog, excess)
    return Steal(victim.name, thief.name, count) if count > 0 else None


def release(workers: Sequence[WorkerView], pending: int) -> list[str]:
    """Active workers that have nothing to do and will get nothing: no row is ``pending`` at the parent and the
    backlogs do not exceed one full batch. Released workers stay released."""
    if pending:
        return []
    backlog = sum(w.backlog for w in workers if w.active)
    return [w.name for w in workers if w.active and w.working_set == 0 and backlog <= w.max_num_seqs]
