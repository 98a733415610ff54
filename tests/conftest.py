"""What all tests share: one thread for each test process, and no clock in property tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Two test processes share two cores in CI: more threads than that only stall one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long one example takes says something about the machine, not about the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
