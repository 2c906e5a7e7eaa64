"""Requests of a session are held, resumed and canceled together, also over a loss."""

import asyncio
from collections.abc import Iterator

import pytest

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.collector_pool import PoolSession
from tests.support.collector_scene import PROMPTS, SAMPLING, CollectorScene


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def test_a_session_is_held_resumed_and_counts_its_open_samples(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    for engine in scene.engines:
        engine.num_free = 0
    done: list[int] = []

    async def sample() -> tuple[int, int, int]:
        async with scene.pool.open(4, lambda: done.append(1)) as session:
            work = asyncio.create_task(session.generate(PROMPTS[:2], 2, SAMPLING))
            while sum(len(engine.sampled) for engine in scene.engines) < 4:
                await asyncio.sleep(0.01)
            assert isinstance(session, PoolSession)
            opened = session.num_open
            await session.hold(cut_off=True)
            assert session.is_held
            await session.resume()
            await work
            while session.num_open:
                await asyncio.sleep(0.01)
            return opened, session.num_cut_off, session.num_open

    assert scene.run(sample()) == (4, 4, 0)
    assert done


def test_a_canceled_call_leaves_no_group_open(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    scene.engines[0].num_free = 0

    async def cancel() -> int:
        async with scene.pool.open() as session:
            work = asyncio.create_task(session.generate(PROMPTS[:1], 2, SAMPLING))
            while not scene.engines[0].sampled:
                await asyncio.sleep(0.01)
            work.cancel()
            while session.num_open:
                await asyncio.sleep(0.01)
            return sum(len(line.groups) for line in scene.pool._handles)

    assert scene.run(asyncio.wait_for(cancel(), 10)) == 0
    scene.engines[0].resume()


def test_a_successor_holds_the_sessions_that_are_held(loop: EventLoop) -> None:
    scene = CollectorScene(loop)

    async def sample() -> int:
        async with scene.pool.open() as session:
            await session.hold(cut_off=True)
            await scene.collectors[0].die()
            while scene.collectors[0].first_group < 0 or not scene.pool._handles[0].is_up:
                await asyncio.sleep(0.01)
            work = asyncio.create_task(session.generate(PROMPTS, 1, SAMPLING))
            await asyncio.sleep(0.5)
            num_early = sum(len(engine.sampled) for engine in scene.engines)
            await session.resume()
            assert len(await work) == 6
            return num_early

    assert scene.run(asyncio.wait_for(sample(), 20)) == 0
