"""How far the slowest engine lags behind the others, at equal load."""

import pytest

from mcore_rl.process.clock import replace_clock
from mcore_rl.rollout.engine_health import EngineLoad
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.paces import EnginePaces, measure_lag


def test_the_slowest_engine_is_compared_with_the_median_of_the_others() -> None:
    paces = EnginePaces()
    for engine, seconds in enumerate([1.0, 1.0, 3.0, 1.5]):
        paces.note(engine, 4.0, 100, seconds)
    assert measure_lag(paces.take()) == {"engines/lag": 3.0, "engines/slowest": 2.0}
    assert measure_lag(paces.take()) == {}


def test_an_engine_with_more_to_do_is_not_slow() -> None:
    """Engine 0 has long had 8 requests and takes twice as long for each, as engine 1 did when it
    had as many.
    """
    paces = EnginePaces()
    paces.note(0, 8.0, 800, 16.0)
    paces.note(1, 8.0, 100, 2.0)
    paces.note(0, 4.0, 100, 1.0)
    paces.note(1, 4.0, 700, 7.7)
    assert measure_lag(paces.take()) == pytest.approx(
        {"engines/lag": 9.7 / 9.0, "engines/slowest": 1.0}
    )


def test_an_engine_without_others_at_its_load_is_not_compared() -> None:
    paces = EnginePaces()
    paces.note(0, 1.0, 10, 1.0)
    paces.note(1, 64.0, 10, 9.0)
    paces.note(2, 1.0, 0, 5.0)
    assert measure_lag(paces.take()) == {}
    paces.add({(0, 1): (10, 1.0), (2, 1): (10, 2.0)})
    assert measure_lag(paces.take()) == {"engines/lag": 2.0, "engines/slowest": 2.0}


def test_the_load_of_a_request_is_the_mean_while_it_was_under_way() -> None:
    """A second passes with each look at the clock; the other request has 2 of the 5 seconds."""
    seconds = iter(range(100))
    with replace_clock(lambda: float(next(seconds))):
        engine = EngineLoad(EngineAddress("http://a", "a.log"))
        with engine.request() as measure:
            now = next(seconds)
            with engine.request():
                now = next(seconds)
            assert measure() == (5.0, 1.4), now
