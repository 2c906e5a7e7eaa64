"""SIGUSR1 is noted, and ends nothing by itself."""

import os
import signal
from collections.abc import Iterator

import pytest

from mcore_rl.process.signals import SIGNAL, is_stop_requested, watch_for_stop_requests


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    yield
    watch_for_stop_requests()
    signal.signal(SIGNAL, before)


def test_a_signal_is_noted_until_a_new_watch_begins() -> None:
    watch_for_stop_requests()
    assert not is_stop_requested()
    os.kill(os.getpid(), SIGNAL)
    assert is_stop_requested()
    watch_for_stop_requests()
    assert not is_stop_requested()
