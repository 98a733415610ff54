"""``BenchOptions``: what every benchmark is told; and the time that it may take. No torch."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from punica_batch.errors import UsageError
from punica_batch.types import Dtype

T = TypeVar("T")

SCHEMA_VERSION = 1  # of the JSON lines
DTYPES: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
MAX_RANK = 256
_DEVICE = "cpu|cuda(:(0|[1-9][0-9]?))?"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """``model_shape``: a key of ``shapes.SHAPES``; ``dtype`` and ``device`` by torch's names; ``rank`` of the adapters.

    ``quick``: fewer points and repeats. ``results``: folder of the JSON lines and figures. ``seconds``: the benchmark
    leaves out points once it has run this long, those that matter least first. Raises ``UsageError``.
    """

    model_shape: str = "7b"
    dtype: Dtype = "float16"
    rank: int = 16
    quick: bool = False
    device: str = "cuda"
    results: Path = Path("results")
    seconds: float = math.inf

    def __post_init__(self) -> None:
        from punica_batch.bench.shapes import SHAPES

        if self.model_shape not in SHAPES:
            raise UsageError(f"--model-shape {self.model_shape}: not one of {', '.join(SHAPES)}")
        if not re.fullmatch(_DEVICE, self.device):
            raise UsageError(f"--device {self.device}: not cuda, cuda:N or cpu")
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: not one of {', '.join(DTYPES)}")
        if not 1 <= self.rank <= MAX_RANK:
            raise UsageError(f"--rank {self.rank}: not from 1 to {MAX_RANK}")
        if not self.seconds >= 0:  # nor not a number
            raise UsageError(f"--seconds {self.seconds}: not 0 or more")

    def pick(self, *, full: T, quick: T, tiny: T) -> T:
        """The sizes to measure: ``tiny`` for the shape of that name, which only shows that a command works."""
        if self.model_shape == "tiny":
            return tiny
        return quick if self.quick else full

    def budget(self) -> Budget:
        """Starts the clock."""
        return Budget(self.seconds)


@dataclass(slots=True)
class Budget:
    """``seconds`` from when it was made."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


def default_results() -> Path:
    """``benchmarks/results`` where that is, as in a checkout; else ``results``."""
    checkout = Path("benchmarks/results")
    return checkout if checkout.is_dir() else Path("results")
