"""A worker that becomes slow takes fewer episodes, and more when it recovered."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.environments.worker_process import WINDOW_LEN, Concurrency


def observe(concurrency, seconds, windows=1):
    reasons = []
    for _ in range(windows):
        num_answers = max(WINDOW_LEN, concurrency.limit)
        reasons += [concurrency.observe(seconds) for _ in range(num_answers)]
    return reasons


def test_it_grows_to_the_most_while_answers_are_fast():
    concurrency = Concurrency(32)
    assert concurrency.limit == 16
    observe(concurrency, 0.01, windows=10)
    assert concurrency.limit == 32


def test_it_falls_by_a_factor_when_answers_are_slow_and_says_why():
    concurrency = Concurrency(32)
    observe(concurrency, 0.01, windows=5)
    reasons = [reason for reason in observe(concurrency, 1.0) if reason]
    assert concurrency.limit == 22
    assert reasons == [
        "its answers take 1.000 s, 0.010 s at best: it takes 22 episodes at once instead of 32"
    ]
    observe(concurrency, 0.01)
    assert concurrency.limit == 26


def test_a_few_slow_answers_change_nothing():
    concurrency = Concurrency(8)
    for number in range(20 * WINDOW_LEN):
        assert not concurrency.observe(9.0 if number % 4 == 0 else 0.01)
    assert concurrency.limit == 8


def test_tasks_that_are_slower_by_nature_do_not_hold_it_down_for_ever():
    concurrency = Concurrency(32)
    observe(concurrency, 0.1)
    observe(concurrency, 1.0, windows=10)
    assert concurrency.limit == concurrency.least == 4
    observe(concurrency, 1.0, windows=20)
    assert concurrency.limit == 32


@given(st.integers(1, 300), st.lists(st.floats(0, 1e6), max_size=200))
def test_the_limit_stays_in_its_bounds(most, seconds):
    concurrency = Concurrency(most)
    for value in seconds:
        concurrency.observe(value)
        assert concurrency.least <= concurrency.limit <= most
