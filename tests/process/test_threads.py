"""Two functions at the same time: both results, either error, and no wait for a lost cause."""

import threading

import pytest

from mcore_rl.process.event_loop import run_both


def test_both_run_at_the_same_time() -> None:
    barrier = threading.Barrier(2)

    def meet(value: str) -> str:
        barrier.wait(20)  # breaks unless the other function runs meanwhile
        return value

    assert run_both(lambda: meet("a"), lambda: meet("b")) == ("a", "b")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_the_error_of_the_second_is_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run_both(lambda: 1, fail)
    assert caught.value is error


def test_an_error_of_the_first_does_not_wait_for_the_second() -> None:
    release = threading.Event()
    with pytest.raises(ZeroDivisionError):
        run_both(lambda: 1 // 0, lambda: release.wait(2))
    release.set()
