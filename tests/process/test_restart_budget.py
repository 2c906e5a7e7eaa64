"""A process may be restarted so often in an hour, not in all of a run."""

from mcore_rl.process.clock import replace_clock
from mcore_rl.process.process_state import HOUR_S, RestartBudget


def test_restarts_of_the_last_hour_count() -> None:
    clock = iter((100.0, 200.0, 300.0, 100.0 + HOUR_S, 100.1 + HOUR_S, 150.0 + HOUR_S, 1e6))
    budget = RestartBudget()

    def take(most: int) -> bool:
        at_s = next(clock)
        with replace_clock(lambda: at_s):
            return budget.take(most)

    assert [take(2) for _ in range(6)] == [True, True, False, False, True, False]
    with replace_clock(lambda: 1e6):
        assert not take(0) and budget.num_recent == 0
