"""Signals are counted instead of ending the agent."""

import os
import signal
from collections.abc import Iterator

import pytest

from mcore_rl.cluster.node_agent.agent import StopSignals

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_each_signal_counts() -> None:
    stops = StopSignals()
    for expected, number in enumerate(SIGNALS, start=1):
        os.kill(os.getpid(), number)
        assert stops.count == expected
