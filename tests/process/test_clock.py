"""The clock that a simulation replaces."""

from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.process.clock import now_s, replace_clock


def test_durations_are_those_of_the_replaced_clock_until_it_is_put_back() -> None:
    times = iter([10.0, 11.0, 15.0, 20.0])
    with replace_clock(lambda: next(times)):
        timer = PhaseTimer(1)
        with timer("sync"):
            pass
        assert timer.metrics() == {"time/sync": 4.0, "time/step": 10.0}
    before = now_s()
    assert 0 <= now_s() - before < 5
