"""What all tests share: one thread for each test process, and no clock in property tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Two test processes share two cores in CI: more threads than that only stall one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long one example takes says something about the machine, not about the code.
# In CI the examples are the same each time, so that a change is judged by itself; elsewhere they are new ones.
settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("default")
