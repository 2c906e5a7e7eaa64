"""Simulated links: how long engines pause, and which version they serve afterwards."""

import asyncio
from collections.abc import Iterator

import pytest

from mcore_rl.simulation.engine import SimulatedEngine
from mcore_rl.simulation.engine_request import EngineSpeed
from mcore_rl.simulation.virtual_loop import VirtualLoop
from mcore_rl.simulation.weights import SimulatedCanary, SimulatedEngineMemory, SimulatedLinks
from mcore_rl.types import VersionSpan, WeightVersion

SPEED = EngineSpeed([0.0, 0.01], 0.0, lambda num_tokens: 0.0, 1000)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize(("staged", "num_before"), [(True, 300), (False, 100)])
def test_staged_engines_decode_until_they_swap(
    loop: VirtualLoop, staged: bool, num_before: int
) -> None:
    engine = SimulatedEngine(loop, "http://e", SPEED, WeightVersion(0))
    links = SimulatedLinks({"http://e": engine}, 2.0, 0.5, 1000, staged=staged)

    async def run() -> tuple[VersionSpan, ...]:
        await links.connect(["http://e"])
        asking = asyncio.create_task(engine.sample(0, 1, 400, 400))
        await asyncio.sleep(1.0)
        report = await links.sync(1)
        assert report.seconds == 2.5 and report.metrics()["sync/mib"] == 1000 / 2**20
        assert report.metrics()["sync/pause_s"] == (0.5 if staged else 2.5)
        return await asking

    before, after = loop.run_until_complete(run())
    assert (before.version, before.stop) == (0, num_before)
    assert (after.version, after.stop) == (1, 400)
    assert links.linked == links.in_rotation == ("http://e",)


def test_a_sync_waits_for_the_step_of_an_engine_that_decodes(loop: VirtualLoop) -> None:
    engine = SimulatedEngine(loop, "http://e", SPEED, WeightVersion(0))
    engines = {"http://e": engine}
    links = SimulatedLinks(engines, 2.0, 0.5, 8, staged=True, waits=True)
    canary = SimulatedCanary(lambda name, predict: None, 0.3, engines)

    async def run(busy: bool) -> float:
        began_s = loop.time()
        asking = asyncio.create_task(engine.sample(0, 1, 400 if busy else 1, 400))
        await asyncio.sleep(1.0)
        await links.sync(1, ["http://e"])
        await canary.check(["http://e"])
        seconds = loop.time() - began_s - 1.0
        await asking
        return seconds

    assert loop.run_until_complete(run(busy=False)) == pytest.approx(2.8)
    assert loop.run_until_complete(run(busy=True)) == pytest.approx(2.8 + 2 * SPEED.fixed_s[1])


def test_an_engine_that_missed_a_sync_is_out_of_rotation(loop: VirtualLoop) -> None:
    engines = {
        url: SimulatedEngine(loop, url, SPEED, WeightVersion(0)) for url in ("http://a", "http://b")
    }
    links = SimulatedLinks(engines, 1.0, 0.1, 8, staged=True)

    async def run() -> None:
        await links.connect(list(engines))
        await links.sync(1)
        await links.sync(2, ["http://b"])

    loop.run_until_complete(run())
    assert links.linked == ("http://a", "http://b")
    assert links.in_rotation == ("http://b",)


def test_a_canary_takes_time_and_finds_no_difference(loop: VirtualLoop) -> None:
    spent = []
    canary = SimulatedCanary(lambda name, predict: spent.append(predict()), 0.5)
    canary.score_on_trainer(WeightVersion(1), None)
    report = loop.run_until_complete(canary.check(["http://a"]))
    assert report.differences == {"http://a": 0.0} and not report.failed
    assert spent == [0.5] and loop.time() == 0.5


def test_only_shared_gpus_take_time_to_change_hands(loop: VirtualLoop) -> None:
    for are_colocated in (False, True):
        began_s = loop.time()
        memory = SimulatedEngineMemory(are_colocated=are_colocated, call_s=2.0)
        for change in (memory.for_training, memory.for_sync, memory.for_rollout):
            loop.run_until_complete(change())
        assert loop.time() - began_s == (6.0 if are_colocated else 0.0)
