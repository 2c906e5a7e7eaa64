"""Requests in flight and idle seconds of an engine."""

from collections.abc import Iterator

import pytest

from mcore_rl.process.clock import replace_clock
from mcore_rl.rollout.engine_health import EngineLoad
from mcore_rl.rollout.engine_spec import EngineAddress


@pytest.fixture
def load() -> Iterator[EngineLoad]:
    """Its clock is a second further at each look."""
    seconds = iter(range(1000))
    with replace_clock(lambda: float(next(seconds))):
        yield EngineLoad(EngineAddress("http://a", "a.log"))


def test_time_is_idle_while_no_request_is_in_flight(load: EngineLoad) -> None:
    assert load.idle_s == 1.0
    with load.request():
        idle_s = load.idle_s
        with load.request():
            assert load.num_in_flight == 2
        assert load.num_in_flight == 1
        assert load.idle_s == idle_s == 2.0, "the clock stands still while there is a request"
    assert load.num_in_flight == 0
    assert load.idle_s == idle_s + 1.0


def test_a_request_that_fails_is_in_flight_no_longer(load: EngineLoad) -> None:
    with pytest.raises(ValueError, match="refused"), load.request():
        raise ValueError("refused")
    assert load.num_in_flight == 0
