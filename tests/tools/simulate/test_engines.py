"""Collectors and transport of a simulation run the real ones' code."""

import asyncio
import gc
import warnings
from collections.abc import Iterator

import pytest

from mcore_rl.batches.group_facts import GroupFacts
from mcore_rl.config.recipe import load_recipe
from mcore_rl.rollout.collector import CollectorCommands, CollectorLostError, GroupRequest
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.request import Sampling
from mcore_rl.tools.simulate.engine import (
    CALL_S,
    SimulatedCollector,
    SimulatedEngine,
    SimulatedTransport,
)
from mcore_rl.tools.simulate.kv_cache import EngineSpeed
from mcore_rl.tools.simulate.virtual_time import VirtualLoop
from mcore_rl.tools.simulate.workload import SimulatedPrompts, Workload
from mcore_rl.types import WeightVersion

SPEED = EngineSpeed([0.01 * num for num in range(9)], 0.0, lambda num_tokens: 0.0, 100_000)
CONFIG = load_recipe("qwen3_30b_a3b_grpo_32", ["simulate.response_len=100"])


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


async def first_group(collector: SimulatedCollector) -> GroupFacts:
    while not (finished := (await collector.poll_events(1000, 0)).finished):
        pass
    return finished[0]


def test_groups_are_sampled_on_the_own_engines_and_only_their_sizes_kept(loop: VirtualLoop) -> None:
    urls = ["http://e-0", "http://e-1"]
    engines = {url: SimulatedEngine(loop, url, SPEED, WeightVersion(5)) for url in urls}
    workload = Workload(CONFIG.simulate, CONFIG.rollout.max_response_len, CONFIG.run.seed)
    addresses = [EngineAddress(url, "") for url in urls]
    transport = SimulatedTransport(engines, workload)
    collector = SimulatedCollector(loop, CONFIG.rollout, addresses, urls[:1], transport)
    request = GroupRequest(0, 7, SimulatedPrompts(30)[2], 4, Sampling(100))

    async def sample() -> None:
        await collector.submit(CollectorCommands(sessions={0: 8}, begin=[request]))
        assert loop.time() == pytest.approx(CALL_S)
        facts = await first_group(collector)
        lens = [workload.finish(2, s)[0] for s in range(4)]
        assert list(facts.response_lens) == lens
        assert {span.version for spans in facts.versions for span in spans} == {5}
        assert collector.store.num_tokens == 4 * 30 + sum(lens) == collector.store.most_tokens
        await collector.submit(CollectorCommands(drop=[7]))
        assert collector.store.num_groups == 0
        assert await collector.idle_seconds() < 0.02

    loop.run_until_complete(sample())
    assert engines[urls[0]].num_tokens > 0 and engines[urls[1]].num_tokens == 0
    assert loop.cpu_s["collectors"] > 0 and loop.cpu_s["engines"] > 0


def test_a_hold_that_cuts_off_aborts_what_is_under_way(loop: VirtualLoop) -> None:
    engine = SimulatedEngine(loop, "http://e", SPEED, WeightVersion(0))
    transport = SimulatedTransport(
        {"http://e": engine},
        Workload(CONFIG.simulate, CONFIG.rollout.max_response_len, CONFIG.run.seed),
    )
    address = [EngineAddress("http://e", "")]
    collector = SimulatedCollector(loop, CONFIG.rollout, address, ["http://e"], transport)
    request = GroupRequest(0, 1, SimulatedPrompts(3)[0], 2, Sampling(100))

    async def sample() -> None:
        await collector.submit(CollectorCommands(sessions={0: 8}, begin=[request]))
        await asyncio.sleep(0.05)
        assert await collector.hold(0, cut_off=True) == 2
        await collector.resume(0)
        assert (await first_group(collector)).group == 1

    loop.run_until_complete(sample())


def test_a_lost_collector_answers_no_call_and_leaves_its_engines(loop: VirtualLoop) -> None:
    engine = SimulatedEngine(loop, "http://e", SPEED, WeightVersion(0))
    transport = SimulatedTransport(
        {"http://e": engine},
        Workload(CONFIG.simulate, CONFIG.rollout.max_response_len, CONFIG.run.seed),
    )
    address = [EngineAddress("http://e", "")]
    collector = SimulatedCollector(loop, CONFIG.rollout, address, ["http://e"], transport)
    request = GroupRequest(0, 1, SimulatedPrompts(3)[0], 2, Sampling(100))

    async def lose() -> None:
        await collector.submit(CollectorCommands(sessions={0: 8}, begin=[request]))
        waiting = asyncio.ensure_future(collector.poll_events(1000, 0))
        await asyncio.sleep(0.05)
        collector.lose("node-1 failed")
        with pytest.raises(CollectorLostError, match="node-1 failed"):
            await waiting
        lost_s = loop.time()
        with pytest.raises(CollectorLostError, match="node-1 failed"):
            await collector.submit(CollectorCommands(drop=[1]))
        assert not await collector.restart(5)
        assert loop.time() == lost_s
        await asyncio.sleep(1000)

    loop.run_until_complete(lose())
    assert engine.busy_s < 0.1, "its requests ended with it"


def test_a_lost_collector_returns_without_samples_where_a_machine_is_spare(
    loop: VirtualLoop,
) -> None:
    engine = SimulatedEngine(loop, "http://e", SPEED, WeightVersion(0))
    workload = Workload(CONFIG.simulate, CONFIG.rollout.max_response_len, CONFIG.run.seed)
    transport = SimulatedTransport({"http://e": engine}, workload)
    address = [EngineAddress("http://e", "")]
    collector = SimulatedCollector(loop, CONFIG.rollout, address, ["http://e"], transport)

    async def sample(group: int) -> None:
        request = GroupRequest(0, group, SimulatedPrompts(3)[0], 2, Sampling(100))
        await collector.submit(CollectorCommands(sessions={0: 8}, begin=[request]))
        while not (await collector.poll_events(1000, 0)).finished:
            pass

    async def lose_and_return() -> None:
        await sample(1)
        assert collector.store.num_groups == 1
        lost_s = loop.time()
        collector.lose("node-1 failed", returns_after_s=30.0)
        assert await collector.restart(5)
        assert loop.time() == lost_s + 30.0 and collector.store.num_groups == 0
        await sample(5)
        assert collector.store.num_groups == 1

    loop.run_until_complete(lose_and_return())


def test_a_call_that_ends_on_its_way_never_begins(loop: VirtualLoop) -> None:
    transport = SimulatedTransport(
        {}, Workload(CONFIG.simulate, CONFIG.rollout.max_response_len, CONFIG.run.seed)
    )
    address = [EngineAddress("http://e", "")]
    collector = SimulatedCollector(loop, CONFIG.rollout, address, ["http://e"], transport)

    async def end() -> None:
        asking = asyncio.ensure_future(collector.poll_events(1000, 0))
        await asyncio.sleep(CALL_S / 2)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert asking in others and len(others) == 2
        for task in others:
            task.cancel()
        await asyncio.wait(others)

    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop.run_until_complete(end())
        gc.collect()
    assert not [each for each in told if "never awaited" in str(each.message)]
