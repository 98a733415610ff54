"""The time that is left, from a clock of its own."""

from __future__ import annotations

import pytest

from punica_batch.job.eta import Eta


def test_the_first_rows_start_the_clock() -> None:
    """A batch of 256 takes 30 s to come back, then 10 rows a second finish."""
    eta = Eta()
    assert eta.seconds(1000, 30.0) is None
    eta.add(0, 5.0)
    eta.add(256, 30.0)
    assert eta.seconds(744, 30.1) is None, "no rate yet"
    eta.add(5, 30.5)
    assert eta.seconds(739, 30.6) is None, "a burst is no rate"
    eta.add(95, 40.0)
    assert eta.seconds(644, 40.0) == pytest.approx(64.4)
    assert eta.seconds(0, 41.0) == 0.0
