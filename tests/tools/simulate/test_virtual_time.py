"""Seconds that ranks spend, one after the other and at once."""

import asyncio
from collections.abc import Iterator

import pytest

from mcore_rl.tools.simulate.placement import RunLostError
from mcore_rl.tools.simulate.virtual_time import VirtualLoop, VirtualTime


@pytest.fixture
def clock() -> Iterator[VirtualTime]:
    loop = VirtualLoop()
    yield VirtualTime(loop)
    loop.close()


def test_others_go_on_while_seconds_are_spent(clock: VirtualTime) -> None:
    done = []

    async def sample() -> None:
        await asyncio.sleep(3)
        done.append(clock.loop.time())

    spans = []
    clock.on_span = lambda *span: spans.append(span)
    clock.loop.create_task(sample())
    clock.spend("train", lambda: 10.0)
    assert done == [3.0]
    [(name, begin_s, end_s)] = spans
    assert (name, begin_s, end_s) == ("train", 0.0, pytest.approx(10, abs=0.01))


def test_two_models_at_once_take_the_longer_time(clock: VirtualTime) -> None:
    def train(seconds: float) -> float:
        clock.spend("one", lambda: seconds)
        clock.spend("two", lambda: seconds)
        return seconds

    assert clock.both(lambda: train(2.0), lambda: train(5.0)) == (2.0, 5.0)
    assert clock.loop.time() == pytest.approx(10, abs=0.01)


def test_the_loss_of_a_rank_ends_the_wait(clock: VirtualTime) -> None:
    clock.loop.call_later(4, clock.lost.set_exception, RunLostError("a GPU failed"))
    with pytest.raises(RunLostError, match="a GPU failed"):
        clock.spend("train", lambda: 10.0)
    assert clock.loop.time() == pytest.approx(4, abs=0.01)
