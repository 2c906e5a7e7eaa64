"""Collectors that are lost: their groups begin again, on others or on their successors."""

import asyncio
from collections.abc import Iterator

import pytest

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.collector_handle import CollectorHandle, PendingGroup
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import GroupLease, StoredSample
from tests.support.collector_scene import PROMPTS, SAMPLING, CollectorScene


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


async def lose_while_sampling(scene: CollectorScene, *lost: int) -> tuple[list[StoredSample], int]:
    """Let collectors die while they sample all prompts; return the samples and those still open."""
    async with scene.pool.open() as session:
        work = asyncio.create_task(session.generate(PROMPTS, 2, SAMPLING))
        while sum(len(engine.sampled) for engine in scene.engines) < 8:
            await asyncio.sleep(0.01)
        for k in lost:
            await scene.collectors[k].die()
            await scene.engines[k].let_go()
        samples = await work
        while session.num_open > 0:
            await asyncio.sleep(0.01)
        return samples, session.num_open


@pytest.mark.parametrize("node_is_there", [True, False])
def test_groups_of_a_lost_collector_begin_again(loop: EventLoop, node_is_there: bool) -> None:
    scene = CollectorScene(loop)
    scene.engines[1].num_free = 0
    scene.collectors[1].node_is_there = node_is_there
    samples, num_open = scene.run(asyncio.wait_for(lose_while_sampling(scene, 1), 20))
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (i, k) for i in range(6) for k in range(2)
    ]
    assert not any(map(scene.pool.is_lost, samples)) and num_open == 0
    assert scene.pool.num_lost == 6, "three of the six groups were under way at the lost collector"
    again = scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    stores = {sample.lease.store for sample in again}
    assert stores == ({0, 1} if node_is_there else {0})
    assert scene.pool.max_in_flight == (8 if node_is_there else 4)
    assert scene.run(scene.pool.idle_seconds()) >= 0


def test_groups_wait_for_the_successor_of_the_only_collector(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    for engine in scene.engines:
        engine.num_free = 0
    samples, num_open = scene.run(asyncio.wait_for(lose_while_sampling(scene, 0, 1), 20))
    assert len(samples) == 12 and num_open == 0 and scene.pool.num_lost >= 8
    assert scene.collectors[0].first_group > 0


def test_complete_samples_of_a_lost_collector_are_known_as_lost(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    samples = scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))

    async def lose() -> None:
        await scene.collectors[0].die()
        while not any(map(scene.pool.is_lost, samples)):
            await asyncio.sleep(0.01)

    scene.run(asyncio.wait_for(lose(), 20))
    assert [scene.pool.is_lost(s) for s in samples] == [s.lease.store == 0 for s in samples]
    assert scene.pool.num_lost == 0, "nothing was under way"


def test_without_any_collector_left_the_pool_fails(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    for engine, collector in zip(scene.engines, scene.collectors, strict=True):
        engine.num_free = 0
        collector.node_is_there = False
    with pytest.raises(RolloutError, match="all nodes with engines are gone"):
        scene.run(asyncio.wait_for(lose_while_sampling(scene, 0, 1), 20))


def test_a_line_whose_collector_is_lost_holds_everything_and_keeps_its_counts(
    loop: EventLoop,
) -> None:
    scene = CollectorScene(loop)
    scene.engines[0].num_free = 0
    [collector, _] = scene.collectors
    line = CollectorHandle(collector, num_engines=1)

    async def cut_off_and_lose() -> list[int]:
        line.open(7, 4)
        future = asyncio.get_running_loop().create_future()
        group = PendingGroup(7, PROMPTS[0], 2, SAMPLING, future)
        line.begin(group, GroupLease(0, 0))
        assert line.open_samples[7] == 2
        await line.flush(scene.health.rotation)
        while len(scene.engines[0].sampled) < 2:
            await asyncio.sleep(0.01)
        counts = [await line.hold(7, cut_off=True)]
        await collector.die()
        counts.append(await line.hold(7, cut_off=True))
        line.forget()
        assert not line.is_up and not line.groups and not line.open_samples
        return [*counts, await line.hold(7, cut_off=True)]

    assert loop.run(asyncio.wait_for(cut_off_and_lose(), 20)) == [2, 2, 2]
    assert loop.run(line.idle_seconds()) is None
