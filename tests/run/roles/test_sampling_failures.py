"""Failures of engines: those of one time count once, late ones not at all."""

from mcore_rl.rollout.transport import RolloutError
from mcore_rl.run.roles.background import SamplingFailures

ERROR = RolloutError("HTTP 503: down")


def test_failures_at_one_time_count_once() -> None:
    failures = SamplingFailures()
    failures.note(ERROR, 0)
    failures.note(ERROR, 0)
    assert failures.num_in_row == 1
    assert failures.error is ERROR


def test_a_group_that_fails_after_the_recovery_it_did_not_see_is_not_counted() -> None:
    failures = SamplingFailures()
    failures.note(ERROR, 0)
    failures.recover()
    failures.note(ERROR, 0)
    assert failures.error is None
    failures.note(ERROR, 1)
    assert failures.num_in_row == 2


def test_a_group_that_is_sampled_ends_the_row() -> None:
    failures = SamplingFailures()
    failures.note(ERROR, 0)
    failures.recover()
    failures.note_success()
    failures.note(ERROR, 1)
    assert failures.num_in_row == 1
