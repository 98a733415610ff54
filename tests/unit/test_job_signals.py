"""When a run is told to stop: at once where nothing looks, by itself where something does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from punica_batch.errors import Interrupted
from punica_batch.job.stop import StopRequest


def tell_oneself(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.fixture
def not_ignored() -> Iterator[None]:
    """A shell's background jobs, and so tests run as one, ignore SIGINT: which is respected."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_raises_where_nothing_polls(number: signal.Signals, not_ignored: None) -> None:
    before = signal.getsignal(number)

    def work() -> None:
        with StopRequest(None):
            try:
                tell_oneself(number)
            except Exception:  # as around a library that raises anything
                pytest.fail("taken for the library's own")

    with pytest.raises(Interrupted, match=number.name):
        work()
    assert signal.getsignal(number) is before


def test_a_signal_is_a_reason_where_something_polls() -> None:
    reasons = []

    def poll() -> None:
        with StopRequest(None) as stop, stop.polled():
            reasons.append(stop.reason)
            tell_oneself(signal.SIGTERM)
            reasons.append(stop.reason)

    with pytest.raises(Interrupted, match="SIGTERM"):
        poll()
    assert reasons == [None, "SIGTERM"]


def test_the_loops_own_error_goes_before_a_signal() -> None:

    def poll(stop: StopRequest) -> None:
        with stop.polled():
            tell_oneself(signal.SIGTERM)
            raise KeyError("the loop's")

    with StopRequest(None) as stop, pytest.raises(KeyError):
        poll(stop)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest(None) as stop:
            tell_oneself(signal.SIGINT)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_time_limit() -> None:
    with StopRequest(0.05) as stop:
        assert stop.reason is None
        time.sleep(0.1)
        assert stop.reason == "--max-runtime"


def test_other_threads_watch_the_time_only() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with StopRequest(0.0001) as stop:
            time.sleep(0.01)
            seen.append((signal.getsignal(signal.SIGTERM), stop.reason))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, "--max-runtime")]
