"""Which points an engine benchmark measures. No torch: the command line reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal, cast

from punica_batch.bench.options import MAX_RANK, BenchOptions
from punica_batch.bench.popularity import ROWS, LoadKind, Popularity
from punica_batch.errors import UsageError

if TYPE_CHECKING:
    from punica_batch.models.weights import RandomWeights

Adapters = Popularity | Literal["none"]

LOADS: tuple[LoadKind, ...] = ("decode", "chat", "label")
ADAPTERS: tuple[Adapters, ...] = ("none", "identical", "skewed", "uniform", "distinct")
WEIGHTS: tuple[RandomWeights, ...] = ("normal", "vllm-dummy")
MIXED_RANKS = (8, 16, 64, 128)
MAX_CAP, MAX_BATCHED_TOKENS = 4096, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """``caps``: rows that run at once. ``ranks``: each of them one rank, or several that a job's adapters have in turn.
    ``share``: of each load's rows, 1 for figures to be quoted. ``longest``: tokens of the decode load's longest row.
    ``batched_tokens``: a step's at most; None: a job's default. ``weights``: the base model's values. Raises
    ``UsageError`` for what there is not."""

    loads: tuple[LoadKind, ...] = LOADS
    caps: tuple[int, ...] = (32, 256)
    adapters: tuple[Adapters, ...] = ADAPTERS
    ranks: tuple[tuple[int, ...], ...] = ((16,),)
    share: float = 1.0
    longest: int = 512
    batched_tokens: int | None = None
    weights: RandomWeights = "normal"

    def __post_init__(self) -> None:
        for name, given, known in (("load", self.loads, LOADS), ("popularity", self.adapters, ADAPTERS)):
            unknown = [value for value in given if value not in known]
            if unknown:
                raise UsageError(f"there is no {name} {unknown[0]!r}: one of {', '.join(known)}")
        for cap in self.caps:
            if not 1 <= cap <= MAX_CAP:
                raise UsageError(f"--caps {cap}: not from 1 to {MAX_CAP}")
        if self.weights not in WEIGHTS:
            raise UsageError(f"--weights {self.weights}: not one of {', '.join(WEIGHTS)}")
        least = max(self.caps)  # every row that runs decodes in each step
        if self.batched_tokens is not None and not least <= self.batched_tokens <= MAX_BATCHED_TOKENS:
            raise UsageError(
                f"--batched-tokens {self.batched_tokens}: not from {least}, the largest of --caps, "
                f"to {MAX_BATCHED_TOKENS}"
            )

    @classmethod
    def of(cls, options: BenchOptions) -> Selection:
        """What is measured where nothing is chosen."""
        ranks = ((options.rank,),)
        few: tuple[Adapters, ...] = ("none", "identical", "distinct")
        return options.pick(
            full=cls(ranks=ranks),
            quick=cls(loads=("decode",), caps=(32,), adapters=few, ranks=ranks, share=0.5),
            tiny=cls(caps=(4,), adapters=few, ranks=ranks, share=0.03, longest=48),
        )

    def choose(
        self,
        *,
        loads: str | None,
        caps: str | None,
        adapters: str | None,
        ranks: tuple[tuple[int, ...], ...],
        batched_tokens: int | None,
        weights: str,
    ) -> Selection:
        """This one with what the command line names, separated by commas, in its place; None leaves it."""
        try:
            numbers = self.caps if caps is None else tuple(map(int, caps.split(",")))
        except ValueError as error:
            raise UsageError(f"--caps {caps}: numbers, separated by commas") from error
        return replace(
            self,
            loads=self.loads if loads is None else cast("tuple[LoadKind, ...]", tuple(loads.split(","))),
            caps=numbers,
            adapters=self.adapters if adapters is None else cast("tuple[Adapters, ...]", tuple(adapters.split(","))),
            ranks=ranks,
            batched_tokens=batched_tokens,
            weights=cast("RandomWeights", weights),
        )

    def points(self) -> Iterator[tuple[LoadKind, Adapters]]:
        """Kind of adapters by kind: where the time runs out, each load has been measured with the first ones."""
        return ((kind, adapters) for adapters, kind in product(self.adapters, self.loads))

    def rows(self, kind: LoadKind, cap: int) -> int:
        """How many a load has at this cap: as at the next cap for which that is laid down."""
        rows = ROWS[min((known for known in ROWS if known >= cap), default=max(ROWS))][kind]
        return max(1, round(rows * self.share))


def parse_ranks(text: str) -> tuple[tuple[int, ...], ...]:
    """``8,64,mix``: rank 8, rank 64, then a mix of ranks. Raises ``UsageError``."""
    try:
        parsed = tuple(MIXED_RANKS if part == "mix" else (int(part),) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--ranks {text}: numbers and mix, separated by commas") from error
    for rank in (rank for ranks in parsed for rank in ranks):
        if not 1 <= rank <= MAX_RANK:
            raise UsageError(f"--ranks {rank}: not from 1 to {MAX_RANK}")
    return parsed
