"""How long a run will still take."""

from __future__ import annotations

_MIN_SECONDS = 1.0  # rows finish in bursts: what one update saw is no rate yet


class Eta:
    """From the rate at which workers finish rows. The first ones only start the clock: what it took to get there, the
    first batch's prompts and answers, tells nothing of the pace that follows."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._rows = 0

    def add(self, rows: int, now: float) -> None:
        """``rows`` have come back at ``now``, in seconds of any clock."""
        if self._began is not None:
            self._rows += rows
        elif rows:
            self._began = now

    def seconds(self, rows_left: int, now: float) -> float | None:
        """None: not known yet."""
        if self._began is None or not self._rows or now - self._began < _MIN_SECONDS:
            return None
        return rows_left * (now - self._began) / self._rows
