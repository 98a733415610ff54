"""``status``: how far an output is, read from outside: no lock is kept, nothing is changed, no input is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.lib import ArrowException

from punica_batch.config import BINDING_FIELDS, JobConfig
from punica_batch.data.commits import open_commits
from punica_batch.data.finish import read_success
from punica_batch.data.layout import Layout
from punica_batch.data.lock import holder_of, lease_holder
from punica_batch.data.plan import Plan
from punica_batch.data.schema import result_schema
from punica_batch.data.segment import recover_frames
from punica_batch.errors import InputError
from punica_batch.types import JsonDict


@dataclass(frozen=True, slots=True)
class SliceStatus:
    """One machine's slice (``--shard``), or the whole. ``rows_done``: in parts and, ``journalled`` of them, not yet;
    ``holder``: the run at work on it, null when there is none."""

    shard: str | None
    rows: int
    rows_done: int
    journalled: int
    parts: int
    parts_done: int
    holder: str | None
    errors_by_code: Mapping[str, int] = field(default_factory=dict)
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutputStatus:
    """``finished``: the output is whole and has its ``_SUCCESS``; ``overwriting``: it is being made anew, and the
    slices are those of the new one. Tokens are those of committed parts."""

    output: str
    finished: bool
    overwriting: bool
    slices: tuple[SliceStatus, ...]

    @property
    def running(self) -> bool:
        return any(part.holder is not None for part in self.slices)

    def as_dict(self) -> JsonDict:
        """JSON-ready, the schema of ``status --json``."""
        names = ("rows", "rows_done", "journalled", "parts", "parts_done", "prompt_tokens", "completion_tokens")
        sums = {name: sum(getattr(part, name) for part in self.slices) for name in names}
        counts: dict[str, Counter[str]] = {"errors_by_code": Counter(), "finish_reasons": Counter()}
        for name, counter in counts.items():
            for part in self.slices:
                counter.update(getattr(part, name))
        return {
            "schema_version": 1,
            "output": self.output,
            "finished": self.finished,
            "running": self.running,
            "overwriting": self.overwriting,
            **sums,
            "rows_error": counts["errors_by_code"].total(),
            **{name: dict(counter) for name, counter in counts.items()},
            "slices": [asdict(part) for part in self.slices],
        }


def output_status(output: str, work_dir: str | None, storage_options: Mapping[str, str]) -> OutputStatus:
    """Raises ``InputError`` when ``output`` has no plan beside it, ``UsageError`` for a remote one without
    ``work_dir``, ``StoreAway``."""
    base = Layout.of_output(output, JobConfig(work_dir=work_dir, storage_options=dict(storage_options)))
    success = read_success(base)
    new, current = _read_plan(base.next_generation()), _read_plan(base)
    is_new = new is not None and (current is None or success is not None)
    layout, plan = (base.next_generation(), new) if is_new else (base, current)
    if plan is None:
        raise no_output(base)
    slices = tuple(_slice(base, layout, plan, index) for index in range(plan.shards))
    return OutputStatus(base.shown, success is not None and not is_new, is_new, slices)


def no_output(layout: Layout) -> InputError:
    """Why there is no plan of it."""
    names, state = layout.store.names(""), layout.store.shown(layout.state)
    if not names or (layout.target is not None and {layout.target, layout.state}.isdisjoint(names)):
        return InputError(f"{layout.shown}: there is no such output")
    return InputError(f"{layout.shown} is not the output of a run: there is no plan in {state}")


def _read_plan(layout: Layout) -> Plan | None:
    data = layout.store.read(layout.in_state("plan.json"))
    return None if data is None else Plan.from_bytes(data, layout.store.shown(layout.in_state("plan.json")))


def _slice(base: Layout, layout: Layout, plan: Plan, index: int) -> SliceStatus:
    own = f"-{index + 1}-of-{plan.shards}" if plan.shards > 1 else ""
    shard = layout.for_shard(index, plan.shards)
    parts = plan.shard_parts(index)
    rows = sum(len(plan.part_rows(part)) for part in parts)
    infos = open_commits(shard, repair=False).load()
    committed = sum(info.rows for info in infos)
    start = plan.part_rows(parts[0]).start if parts else 0
    errors, reasons = Counter[str](), Counter[str]()
    for info in infos:
        errors.update(info.errors)
        reasons.update(info.finish_reasons)
    waiting = _journalled(shard.journal, plan, start + committed) if committed < rows else {}
    errors.update(error.partition(":")[0] for error in waiting.values() if error is not None)
    holder = holder_of(base.local / f"lock{own}")
    if holder is None and not base.store.is_local:
        holder = lease_holder(base.store, base.in_state(f"lease{own}"))
    return SliceStatus(
        shard=f"{index + 1}/{plan.shards}" if own else None,
        rows=rows,
        rows_done=committed + len(waiting),
        journalled=len(waiting),
        parts=len(parts),
        parts_done=len(infos),
        holder=holder,
        errors_by_code=dict(errors),
        finish_reasons=dict(reasons),
        prompt_tokens=sum(info.prompt_tokens for info in infos),
        completion_tokens=sum(info.completion_tokens for info in infos),
    )


def _journalled(folder: Path, plan: Plan, next_row: int) -> dict[int, str | None]:
    """Row → its error (None: it went well) of the journalled rows from ``next_row`` on. A success counts before an
    error. Segments that a run at work deletes meanwhile have become parts, and are left out."""
    schemas = _journal_schemas(plan)
    found: dict[int, str | None] = {}
    for path in sorted(folder.glob("*.seg")):
        try:
            payloads = [payload for _, payload in recover_frames(path, repair=False)]
        except FileNotFoundError:
            continue
        for payload in payloads:
            batch = _decode(payload, schemas)
            for row, error in zip(batch["row"].to_pylist(), batch["error"].to_pylist(), strict=True):
                if row >= next_row and (row not in found or error is None):
                    found[row] = error
    return found


def _journal_schemas(plan: Plan) -> list[pa.Schema]:
    """With and without lists of samples: which it is depends on the input, too, that is not opened here."""
    bound: dict[str, Any] = {name: plan.binding[name] for name in BINDING_FIELDS}
    config = JobConfig.model_validate(bound)
    row = pa.field("row", pa.int64(), nullable=False)
    return [result_schema(config, lists=lists).insert(0, row) for lists in (True, False)]


def _decode(payload: bytes, schemas: list[pa.Schema]) -> pa.RecordBatch:
    """Lists have more buffers than plain columns, so a plain batch is no batch of lists; the other way round is not
    noticed, hence the order of ``schemas``."""
    for schema in schemas[:-1]:
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
            batch.validate()
        except (ArrowException, OSError):
            continue
        return batch
    return pa.ipc.read_record_batch(pa.py_buffer(payload), schemas[-1])
