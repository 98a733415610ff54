"""Steps captured as CUDA graphs: what a step's shape launches is launched as a whole from its second time on.

A graph reads only what stays in its place: the step buffer, the attention backend's plans, the KV cache, the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from punica_batch.scheduler.padding import StepShape

# A bound on what graphs hold of the device: most jobs have fewer kinds of step. What comes after runs as it is.
MAX_GRAPHS = 256

Forward = Callable[[], Tensor]
Replay = Callable[[Forward], Tensor]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """``tiles``: (``block_m``, number of tiles) of each kernel family; none for a step without adapters."""

    shape: StepShape
    tiles: tuple[tuple[int, int], ...]


class Recorder(Protocol):
    """Makes of a forward pass what repeats it for other numbers in the same places.

    What it answers is called with the forward pass of the step at hand, which a recorder that captured nothing can
    run; the recording itself computes nothing that is used.
    """

    def __call__(self, forward: Forward) -> Replay: ...


class StepGraphs:
    """The graphs of one engine, recorded when a step of their kind first comes up."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._graphs: dict[GraphKey, Replay] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: GraphKey, forward: Forward) -> Tensor:
        """``forward()``, replayed where it was recorded before. The result is good until the next step runs."""
        replay = self._graphs.get(key)
        if replay is not None:
            return replay(forward)
        hidden = forward()  # compiles what is not compiled yet: a capture must not
        if len(self._graphs) >= MAX_GRAPHS:
            return hidden
        try:
            self._graphs[key] = self._record(forward)
        except torch.OutOfMemoryError:  # there is room for the step, but not for its graph
            self._graphs[key] = _run_as_it_is
        return hidden


def _run_as_it_is(forward: Forward) -> Tensor:
    return forward()


class CudaRecorder:
    """Captures on a stream of its own. All graphs share one memory pool, as they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, forward: Forward) -> Replay:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # threads that load adapters go on allocating meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden = forward()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)

        def replay(forward: Forward) -> Tensor:
            graph.replay()
            return hidden

        return replay
