"""Sessions are found by their names, are bounded in number, and end when nobody uses them."""

import time
from collections.abc import Iterator

import pytest

from mcore_rl.services.sandbox.languages import readable_paths
from mcore_rl.services.sandbox.limits import Limits, SandboxFullError
from mcore_rl.services.sandbox.service import Sessions
from tests.support.sandboxes import wait_until

LIMITS = Limits(wall_s=600, cpu_s=600)


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    made = Sessions(readable_paths({}), max_sessions=1, idle_s=2.0)
    yield made
    made.close_all()


def test_a_session_is_found_until_it_is_closed(sessions: Sessions) -> None:
    name = sessions.open("bash", LIMITS)
    assert sessions.find(name).call("echo 1", 60).stdout == b"1\n"
    with pytest.raises(SandboxFullError, match="all 1 sessions"):
        sessions.open("bash", LIMITS)
    sessions.close(name)
    with pytest.raises(ValueError, match="no such session"):
        sessions.find(name)
    sessions.close(sessions.open("python", LIMITS))


def test_an_idle_session_ends_and_a_busy_one_does_not(sessions: Sessions) -> None:
    name = sessions.open("bash", LIMITS)
    session = sessions.find(name)
    assert session.call("sleep 3; echo 1", 60).stdout == b"1\n"
    assert len(sessions) == 1
    began_s = time.monotonic()
    wait_until(lambda: len(sessions) == 0, "the idle session ended")
    assert time.monotonic() - began_s > 1


def test_a_session_that_cannot_start_leaves_its_place(sessions: Sessions) -> None:
    with pytest.raises(ValueError, match="kind"):
        sessions.open("perl", LIMITS)
    sessions.close(sessions.open("bash", LIMITS))


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="idle_s=0"):
        Sessions([], 1, 0)
