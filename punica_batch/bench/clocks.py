"""What a GPU's clock and power are while something runs: a GPU at its power limit computes slower than in a burst."""

from __future__ import annotations

import statistics
import threading
from types import TracebackType

import torch

from punica_batch.types import JsonDict

_PERIOD = 0.2  # seconds; NVML has a new value every 1/6 s to 1 s


class Clocks:
    """A context in which a thread reads NVML. On a CPU, and where NVML does not answer, nothing is read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="clocks", daemon=True)

    def __enter__(self) -> Clocks:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def medians(self) -> JsonDict:
        """``sm_clock_mhz`` and ``power_w``; empty where nothing was read."""
        if not self._samples:
            return {}
        clock, milliwatts = (statistics.median(values) for values in zip(*self._samples, strict=True))
        return {"sm_clock_mhz": round(clock), "power_w": round(milliwatts / 1000)}

    def _read(self) -> None:
        while not self._ended.wait(_PERIOD):
            try:
                self._samples.append((torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device)))
            except Exception:  # of NVML, or its absence: the figures stand without
                return
