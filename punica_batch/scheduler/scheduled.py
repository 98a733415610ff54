"""What ``Scheduler.schedule`` answers: one step's sequences in the order of the batch's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from punica_batch.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledSequence:
    """``num_tokens`` tokens from position ``sequence.num_computed_tokens`` on. ``samples``: they reach the last
    known token, so a new one is sampled. ``is_prefill``: more than one token, or not yet at the end."""

    sequence: Sequence
    num_tokens: int
    samples: bool

    @property
    def is_prefill(self) -> bool:
        return self.num_tokens > 1 or not self.samples


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Prefills first, decodes last, each ordered by adapter (then arrival) and arranged so that an adapter
    on both sides of the border meets itself there. ``preempted`` went back to waiting while planning this step."""

    prefills: list[ScheduledSequence]
    decodes: list[ScheduledSequence]
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        """All, in the order of the batch's rows."""
        return [*self.prefills, *self.decodes]

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order in which their tokens come."""
        return [item.sequence for item in self.scheduled if item.samples]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.prefills) + len(self.decodes)


def arrange(items: list[ScheduledSequence], preempted: list[Sequence]) -> ScheduledBatch:
    """Orders each half by adapter (base first), with the first adapter that both halves have at the border."""
    prefills = [item for item in items if item.is_prefill]
    decodes = [item for item in items if not item.is_prefill]
    shared = {item.sequence.lora_id for item in prefills} & {item.sequence.lora_id for item in decodes}
    border = min(shared, key=_adapter_key) if shared else None

    def order(item: ScheduledSequence, side: int) -> tuple[int, tuple[bool, str], int]:
        lora_id = item.sequence.lora_id
        return side if shared and lora_id == border else 0, _adapter_key(lora_id), item.sequence.arrival

    return ScheduledBatch(
        prefills=sorted(prefills, key=lambda item: order(item, 1)),
        decodes=sorted(decodes, key=lambda item: order(item, -1)),
        preempted=preempted,
    )


def _adapter_key(lora_id: str | None) -> tuple[bool, str]:
    return lora_id is not None, lora_id or ""
