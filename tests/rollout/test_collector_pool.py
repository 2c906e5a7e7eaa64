"""Prompts over several collectors: spread, order, engines out of rotation, leases, failures."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from mcore_rl.config import RolloutConfig
from mcore_rl.data.sample_store import SampleStore
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import Collector, CollectorNews
from mcore_rl.rollout.collector_pool import CollectorPool
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions, RolloutError
from mcore_rl.types import Prompt
from tests.support.fake_sglang import FakeSGLang

CONFIG = RolloutConfig(max_response_len=3, retries=0, max_concurrency=4)
SAMPLING = Sampling(3)
PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", "") for i in range(6)]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


class Scene:
    """Two collectors with an engine each."""

    def __init__(self, loop: EventLoop) -> None:
        self.run = loop.run
        self.engines = [FakeSGLang(loop), FakeSGLang(loop)]
        urls = [engine.url for engine in self.engines]
        addresses = [engine.address for engine in self.engines]
        self.stores = [SampleStore(), SampleStore()]
        self.collectors = []
        transport = HttpOptions.of(CONFIG, [9], str).open
        for url, store in zip(urls, self.stores, strict=True):
            health = EngineHealth(urls)
            client = RolloutClient(addresses, CONFIG, transport, health, own=[url])
            self.collectors.append(Collector(client, health, store))
        self.health = EngineHealth(urls)
        self.pool = CollectorPool(self.collectors, [1, 1], self.health, CONFIG.max_concurrency)

    def num_kept(self) -> list[int]:
        return [store.num_groups for store in self.stores]

    def prompts_of(self, engine: int) -> set[int]:
        return {body["input_ids"][1] - 2 for body in self.engines[engine].sampled}


def test_prompts_are_spread_and_samples_come_in_their_order(loop: EventLoop) -> None:
    scene = Scene(loop)
    assert scene.pool.max_in_flight == 8
    samples = scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (i, k) for i in range(6) for k in range(2)
    ]
    assert {s.response_len for s in samples} == {3} and {s.finish_reason for s in samples} == {
        "length"
    }
    assert scene.num_kept() == [3, 3]
    assert scene.prompts_of(0) == {0, 2, 4} and scene.prompts_of(1) == {1, 3, 5}
    assert scene.run(scene.pool.idle_seconds()) > 0


def test_stores_keep_a_group_as_long_as_one_of_its_samples_is_known(loop: EventLoop) -> None:
    scene = Scene(loop)
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
    scene = Scene(loop)
    for index, length in ((4, 900), (1, 500), (3, 2)):
        scene.pool.history.note(PROMPTS[index], [length])
    samples = scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    assert [s.prompt.index for s in samples[::2]] == list(range(6))
    # Groups go to the two collectors in turn, in the order in which they begin.
    assert scene.prompts_of(0) == {4, 0, 5} and scene.prompts_of(1) == {1, 2, 3}
    again = scene.pool.history.longest_first(PROMPTS)
    assert again == list(range(6)), "by now all were of one length"


def test_engines_out_of_rotation_get_no_requests_of_any_collector(loop: EventLoop) -> None:
    scene = Scene(loop)
    serving = scene.engines[1].url
    scene.health.set_serving([serving], {scene.engines[0].url: "it is stale"})
    assert len(scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))) == 12
    assert not scene.engines[0].sampled and len(scene.engines[1].sampled) == 12
    scene.health.set_serving([engine.url for engine in scene.engines], {})
    scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    assert scene.engines[0].sampled


def test_a_failed_group_fails_its_call_and_the_next_one_works(loop: EventLoop) -> None:
    scene = Scene(loop)
    for engine in scene.engines:
        engine.answer = lambda body: (503, "down") if body["input_ids"][1] == 4 else None
    with pytest.raises(RolloutError, match="HTTP 503: down"):
        scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    for engine in scene.engines:
        engine.answer = lambda body: None
    assert len(scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))) == 12


def test_a_session_is_held_resumed_and_counts_its_open_samples(loop: EventLoop) -> None:
    scene = Scene(loop)
    for engine in scene.engines:
        engine.num_free = 0
    done: list[int] = []

    async def sample() -> tuple[int, int, int]:
        async with scene.pool.open(4, lambda: done.append(1)) as session:
            work = asyncio.create_task(session.generate(PROMPTS[:2], 2, SAMPLING))
            while sum(len(engine.sampled) for engine in scene.engines) < 4:
                await asyncio.sleep(0.01)
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
    scene = Scene(loop)
    scene.engines[0].num_free = 0

    async def cancel() -> int:
        async with scene.pool.open() as session:
            work = asyncio.create_task(session.generate(PROMPTS[:1], 2, SAMPLING))
            while not scene.engines[0].sampled:
                await asyncio.sleep(0.01)
            work.cancel()
            while session.num_open:
                await asyncio.sleep(0.01)
            return len(scene.pool._groups)

    assert scene.run(asyncio.wait_for(cancel(), 10)) == 0
    scene.engines[0].resume()


def test_a_lost_collector_fails_all_who_wait(loop: EventLoop) -> None:
    scene = Scene(loop)

    async def lose(wait_s: float, gather_s: float = 0.0) -> CollectorNews:
        raise ConnectionError("node 7 is gone")

    scene.collectors[1].news = lose  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="node 7 is gone"):
            scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
