"""One sample of one row while a worker runs it: the mutable counterpart of the immutable ``Request``."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from punica_batch.types import Request


class SequenceStatus(StrEnum):
    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds blocks; its adapter is pinned
    FINISHED = "finished"


def _int32_array() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Sequence:
    """Sample number ``sample`` (0 .. n-1) of ``request``. Compared by identity.

    - ``output_token_ids``: the tokens sampled so far and known; they survive a preemption;
    - ``num_pending``: tokens that steps under way sample: they are there, but their values are not known yet;
    - ``seat``: its place among the running, 0 .. max_num_seqs-1 (-1: none), where the device keeps its last token;
    - ``num_computed_tokens``: leading tokens whose keys and values are in the cache;
    - ``block_table``: int32 block ids; position p lives in block ``block_table[p // block_size]``;
    - ``arrival``: set by ``Scheduler.add``, kept through preemptions: smaller is older;
    - ``started``: it has run at least once, so it cannot be taken back;
    - ``passed``: newer sequences admitted ahead of it while its adapter kept it waiting.
    """

    request: Request
    sample: int = 0
    arrival: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    seat: int = -1
    num_computed_tokens: int = 0
    block_table: array[int] = field(default_factory=_int32_array)
    started: bool = False
    passed: int = 0

    @property
    def lora_id(self) -> str | None:
        return self.request.lora_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens, pending ones included."""
        return len(self.output_token_ids) + self.num_pending

    @property
    def num_tokens(self) -> int:
        """The prompt's tokens and the sampled ones."""
        return len(self.request.prompt_token_ids) + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output as one new list; ``tokens`` is the cheap way to a part of it."""
        return [*self.request.prompt_token_ids.tolist(), *self.output_token_ids]

    def take(self, token_id: int) -> None:
        """The value of the oldest pending token."""
        self.num_pending -= 1
        self.output_token_ids.append(token_id)

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Token ids of positions ``start`` .. ``stop - 1``, which must be known; int32 [stop - start]."""
        prompt = self.request.prompt_token_ids
        first_output = len(prompt)
        if stop <= first_output:
            return prompt[start:stop]
        outputs = self.output_token_ids[max(start - first_output, 0) : stop - first_output]
        return np.concatenate([prompt[start:first_output], np.array(outputs, dtype=np.int32)])
