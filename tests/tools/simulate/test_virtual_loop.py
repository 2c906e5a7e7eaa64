"""Virtual time: it jumps, it tells a standstill, and it knows whose callbacks cost how much."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from mcore_rl.tools.simulate.virtual_time import (
    CONTROLLER,
    SimulationStuckError,
    VirtualLoop,
    context_of,
)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_hours_pass_in_no_time_and_in_order(loop: VirtualLoop) -> None:
    order = []

    async def wait(hours: float) -> None:
        await asyncio.sleep(3600 * hours)
        order.append((hours, loop.time()))

    async def wait_all() -> None:
        await asyncio.gather(*(wait(hours) for hours in (3, 1, 2)))

    began = time.monotonic()
    loop.run_until_complete(wait_all())
    assert order == [(1, 3600), (2, 7200), (3, 10800)]
    assert time.monotonic() - began < 10


def test_a_wait_without_an_end_is_an_error(loop: VirtualLoop) -> None:
    with pytest.raises(SimulationStuckError, match="still waits"):
        loop.run_until_complete(loop.create_future())


def test_cpu_seconds_are_those_of_the_owner(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)

    async def work(seconds: float) -> None:
        nonlocal now_s
        await asyncio.sleep(1)
        now_s += seconds

    async def both() -> None:
        theirs = loop.create_task(work(4.0), context=context_of("engines"))
        await asyncio.gather(work(0.5), theirs)

    loop.run_until_complete(both())
    assert loop.cpu_s == {"engines": 4.0, CONTROLLER: 0.5}


def test_the_clock_moves_on_also_after_years(loop: VirtualLoop) -> None:
    async def tick() -> None:
        await asyncio.sleep(1e9)
        for _ in range(100):
            await asyncio.sleep(1e-8)

    loop.run_until_complete(tick())
    assert loop.time() >= 1e9
