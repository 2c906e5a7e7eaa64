"""Waiting: it ends when the thing is done, when the time is up, or when it has become pointless."""

import time

import pytest

from mcore_rl.weight_sync.waits import FAILURE_POLL_S, wait_until


def never(seconds: float) -> bool:
    time.sleep(max(0.0, min(seconds, 0.01)))
    return False


def test_a_wait_that_succeeds_has_no_reason_even_if_late_or_failed() -> None:
    assert wait_until(lambda _: True, time.monotonic() - 1, lambda: "failed") is None


def test_a_wait_ends_at_its_deadline() -> None:
    assert wait_until(never, time.monotonic() + 0.03, lambda: None) == "the time is up"


def test_a_failure_elsewhere_ends_the_wait_before_its_deadline() -> None:
    failures = iter([None, None, "trainer rank 1: gone"])
    assert (
        wait_until(never, time.monotonic() + 60, lambda: next(failures)) == "trainer rank 1: gone"
    )


@pytest.mark.parametrize("left_s", [0.1, 60.0])
def test_a_single_wait_is_never_longer_than_the_time_left_or_the_poll(left_s: float) -> None:
    allowed: list[float] = []

    def is_done(seconds: float) -> bool:
        allowed.append(seconds)
        return True

    wait_until(is_done, time.monotonic() + left_s, lambda: None)
    assert 0 < allowed[0] <= min(left_s, FAILURE_POLL_S)
