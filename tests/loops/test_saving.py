"""Which steps are saved, and how a run that is asked to stop ends."""

import os
import signal
from collections.abc import Iterator

import pytest

from mcore_rl.loops.saving import is_due, save_if_due
from mcore_rl.process.signals import SIGNAL, StoppedEarlyError, watch_for_stop_requests


@pytest.fixture
def asked_to_stop() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    watch_for_stop_requests()
    os.kill(os.getpid(), SIGNAL)
    yield
    watch_for_stop_requests()
    signal.signal(SIGNAL, before)


@pytest.mark.parametrize(
    ("every_steps", "due"), [(0, [6]), (1, [1, 2, 3, 4, 5, 6]), (4, [4, 6]), (6, [6]), (9, [6])]
)
def test_the_last_step_is_always_due(every_steps: int, due: list[int]) -> None:
    assert [step for step in range(1, 7) if is_due(step, every_steps, 6)] == due


def test_only_steps_that_are_due_are_saved() -> None:
    saved: list[int] = []
    told = [save_if_due(step, 2, 5, lambda step=step: saved.append(step)) for step in range(1, 6)]
    assert saved == [2, 4, 5]
    assert told == [False, True, False, True, True]


def test_a_run_that_is_asked_to_stop_saves_its_step_first(asked_to_stop: None) -> None:
    saved: list[int] = []
    with pytest.raises(StoppedEarlyError, match=r"after step 3 of 5; the same command continues"):
        save_if_due(3, 0, 5, lambda: saved.append(3))
    assert saved == [3]


def test_a_run_at_its_last_step_ends_as_usual(asked_to_stop: None) -> None:
    saved: list[int] = []
    save_if_due(5, 0, 5, lambda: saved.append(5))
    assert saved == [5]
