"""Prompts over several collectors: spread, order, engines out of rotation, leases, failures."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.collector import CollectorEvents
from mcore_rl.rollout.collector_pool import CollectorPool
from mcore_rl.rollout.engine_health import JoinedEngine
from mcore_rl.rollout.transport import RolloutError
from tests.support.collector_scene import PROMPTS, SAMPLING, CollectorScene
from tests.support.fake_sglang import FakeSGLang


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def test_prompts_are_spread_and_samples_come_in_their_order(loop: EventLoop) -> None:
    pool: CollectorPool = (scene := CollectorScene(loop)).pool
    assert pool.max_in_flight == 8
    samples = scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (i, k) for i in range(6) for k in range(2)
    ]
    assert {s.response_len for s in samples} == {3} and {s.finish_reason for s in samples} == {
        "length"
    }
    assert (pool.num_done, pool.num_tokens) == (12, 36)
    assert scene.num_kept() == [3, 3]
    assert scene.prompts_of(0) == {0, 2, 4} and scene.prompts_of(1) == {1, 3, 5}
    assert scene.run(scene.pool.idle_seconds()) > 0


def test_stores_keep_a_group_as_long_as_one_of_its_samples_is_known(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    samples = scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    kept = samples[1]
    del samples
    gc.collect()
    more = scene.run(scene.pool.generate(PROMPTS[:1], 1, SAMPLING))
    assert sum(scene.num_kept()) == 2
    store = scene.stores[kept.lease.store]
    assert store.samples([kept.lease.group], [1])[0].prompt.index == 0
    del kept, more
    gc.collect()
    assert scene.run(scene.pool.generate(PROMPTS[:2], 1, SAMPLING))
    assert sum(scene.num_kept()) <= 3


def test_prompts_with_long_responses_begin_first_and_keep_their_places(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    for index, length in ((4, 900), (1, 500), (3, 2)):
        scene.pool.history.note(PROMPTS[index], [length])
    samples = scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    assert [s.prompt.index for s in samples[::2]] == list(range(6))
    # Groups go to the two collectors in turn, in the order in which they begin.
    assert scene.prompts_of(0) == {4, 0, 5} and scene.prompts_of(1) == {1, 2, 3}
    again = scene.pool.history.sort_longest_first(PROMPTS)
    assert again == list(range(6)), "by now all were of one length"


def test_engines_out_of_rotation_get_no_requests_of_any_collector(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    serving = scene.engines[1].url
    scene.health.set_serving([serving], {scene.engines[0].url: "it is stale"})
    assert len(scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))) == 12
    assert not scene.engines[0].sampled and len(scene.engines[1].sampled) == 12
    scene.health.set_serving([engine.url for engine in scene.engines], {})
    scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    assert scene.engines[0].sampled


def test_requests_that_a_nodes_only_engine_failed_go_to_another_node(loop: EventLoop) -> None:
    """Nobody has noticed yet that the engine is dead: all are still in rotation."""
    scene = CollectorScene(loop, retries=1)
    scene.engines[0].answer = lambda body: (503, "dead")
    assert len(scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))) == 12
    assert scene.health.serving == [engine.url for engine in scene.engines]
    assert scene.num_kept() == [3, 3]


def test_a_failed_group_fails_its_call_and_the_next_one_works(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    for engine in scene.engines:
        engine.answer = lambda body: (503, "down") if body["input_ids"][1] == 4 else None
    with pytest.raises(RolloutError, match="HTTP 503: down"):
        scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    for engine in scene.engines:
        engine.answer = lambda body: None
    assert len(scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))) == 12


def test_a_failure_of_the_pool_fails_all_who_wait(loop: EventLoop) -> None:
    scene = CollectorScene(loop)

    async def lose(wait_s: float, gather_s: float = 0.0) -> CollectorEvents:
        raise ConnectionError("node 7 is gone")

    scene.collectors[1].poll_events = lose  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="node 7 is gone"):
            scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))


def test_an_engine_that_joins_is_given_work_and_one_that_leaves_is_not(loop: EventLoop) -> None:
    """The engine of collector 1 moves; requests that wait there for a slot follow it."""
    scene = CollectorScene(loop)
    third = FakeSGLang(loop)
    moved = JoinedEngine(replace(third.address, number=1), home=1)
    scene.engines[1].num_free = 0

    async def move_while_sampling() -> list[int]:
        sampling = asyncio.create_task(scene.pool.generate(PROMPTS, 4, SAMPLING))
        while len(scene.engines[1].sampled) < 4:
            await asyncio.sleep(0.01)
        scene.health.join(moved, "")
        scene.health.leave(scene.engines[1].url)
        await scene.engines[1].let_go()
        return [engine for sample in await sampling for engine in sample.engines]

    engines = scene.run(asyncio.wait_for(move_while_sampling(), 20))
    assert len(scene.engines[1].sampled) == 4 and len(third.sampled) == 8
    assert Counter(engines) == {0: 16, 1: 8}, "the first two have the number 0"
    assert scene.pool.max_in_flight == 8
    scene.health.join(JoinedEngine(replace(scene.engines[1].address, number=2), home=0), "")
    assert scene.pool.max_in_flight == 12
    scene.health.leave(third.url)
    scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    assert len(third.sampled) == 8 and len(scene.engines[1].sampled) > 4


def test_groups_that_are_canceled_without_a_collector_are_open_no_more(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    may_return = asyncio.Event()

    async def restart(first_group: int) -> bool:
        return await may_return.wait()

    for engine, collector in zip(scene.engines, scene.collectors, strict=True):
        engine.num_free = 0
        collector.restart = restart  # type: ignore[method-assign]

    async def cancel_while_all_are_lost() -> list[int]:
        async with scene.pool.open() as session:
            sampling = asyncio.create_task(session.generate(PROMPTS, 1, SAMPLING))
            while sum(len(engine.sampled) for engine in scene.engines) < 6:
                await asyncio.sleep(0.001)
            for collector in scene.collectors:
                await collector.die()
            while len(scene.pool._waiting) < 6:
                await asyncio.sleep(0.001)
            before = session.num_open
            sampling.cancel()
            await asyncio.wait([sampling])
            await asyncio.sleep(0)
            return [before, session.num_open]

    assert scene.run(asyncio.wait_for(cancel_while_all_are_lost(), 60)) == [6, 0]
