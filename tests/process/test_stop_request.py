"""SIGUSR1 and SIGTERM are noted while a loop runs, and end it within the grace."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from mcore_rl.process import signals
from mcore_rl.process.signals import (
    EXIT_STATUS,
    SIGNAL,
    OverdueStopError,
    StoppedEarlyError,
    TerminatedError,
    allow_interruption,
    forbid_interruption,
    handle_stops,
    is_stop_requested,
    terminate,
    watch_for_stop_requests,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in (SIGNAL, signal.SIGTERM)]
    watch_for_stop_requests()
    signal.signal(signal.SIGTERM, terminate)
    yield
    watch_for_stop_requests()
    for number, handler in before:
        signal.signal(number, handler)


def wait(seconds: float = 20.0) -> None:
    """Wait as a rollout does; a signal that only is noted does not end the wait."""
    threading.Event().wait(seconds)


def wait_until_told() -> None:
    """Wait until stderr says that a stop is overdue where nothing is interrupted."""
    until_s = time.monotonic() + 20.0
    while not signals._stop.is_told:
        assert time.monotonic() < until_s
        wait(0.01)


def list_waits() -> list[float]:
    """Return after how many seconds each of the timers sends its signal."""
    return [timer.interval for timer in signals._stop.timers]


def test_a_signal_is_noted_until_a_new_watch_begins() -> None:
    assert not is_stop_requested()
    os.kill(os.getpid(), SIGNAL)
    assert is_stop_requested()
    watch_for_stop_requests()
    assert not is_stop_requested()


@pytest.mark.parametrize(
    ("number", "grace_s", "waits"), [(SIGNAL, 0.6, [0.3]), (signal.SIGTERM, 2.0, [2.0, 1.0])]
)
def test_what_may_be_interrupted_is_after_half_of_the_grace(
    number: signal.Signals, grace_s: float, waits: list[float]
) -> None:
    began_s = time.monotonic()
    with handle_stops(grace_s):
        os.kill(os.getpid(), number)
        assert is_stop_requested() and list_waits() == waits
        with pytest.raises(OverdueStopError), allow_interruption():
            wait()
        assert time.monotonic() - began_s >= grace_s / 2
        with pytest.raises(OverdueStopError), allow_interruption():
            raise AssertionError("it is overdue already")
        os.kill(os.getpid(), SIGNAL)  # nothing that trains is interrupted


def test_what_must_not_be_cut_ends_before_an_overdue_stop_does() -> None:
    ended: list[str] = []
    with handle_stops(0.4):
        os.kill(os.getpid(), SIGNAL)
        stopped = pytest.raises(OverdueStopError, match="since the request to stop")
        with stopped, allow_interruption():
            with forbid_interruption():
                ended.append("before it is due")
            with forbid_interruption():
                wait_until_told()
                ended.append("overdue")
            ended.append("never")
        with forbid_interruption():
            ended.append("nothing may be interrupted here")
    assert ended == ["before it is due", "overdue", "nothing may be interrupted here"]


def test_an_error_comes_before_an_overdue_stop() -> None:
    with handle_stops(0.1), pytest.raises(KeyError), allow_interruption(), forbid_interruption():
        os.kill(os.getpid(), SIGNAL)
        wait_until_told()
        raise KeyError


def test_a_request_from_before_the_loop_counts() -> None:
    os.kill(os.getpid(), SIGNAL)
    with (
        pytest.raises(StoppedEarlyError, match="within a step"),
        handle_stops(0.1),
        allow_interruption(),
    ):
        wait()


def test_training_goes_on_after_sigusr1_and_until_the_grace_ends_after_sigterm(
    capfd: pytest.CaptureFixture[str],
) -> None:
    began_s = time.monotonic()
    with handle_stops(grace_s=0.4):
        os.kill(os.getpid(), SIGNAL)
        assert list_waits() == [0.2]
        while not signals._stop.is_told and time.monotonic() < began_s + 20.0:
            wait(0.01)
        assert time.monotonic() - began_s >= 0.2
        os.kill(os.getpid(), SIGNAL)
        told = capfd.readouterr().err
        assert told.count("half of run.grace_s is over since the request to stop") == 1
        began_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert list_waits() == [0.2, 0.4]
        with pytest.raises(TerminatedError) as raised:
            wait()
    assert time.monotonic() - began_s >= 0.4
    assert raised.value.code == EXIT_STATUS, "the same command continues"


def test_a_second_sigterm_ends_a_run_at_once() -> None:
    with handle_stops(grace_s=60.0):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(TerminatedError):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("is_over", [False, True])
def test_without_a_loop_or_a_grace_sigterm_ends_the_process(is_over: bool) -> None:
    with pytest.raises(TerminatedError) as raised:
        with handle_stops(grace_s=0.0 if not is_over else 60.0):
            if not is_over:
                os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert raised.value.code == 143
