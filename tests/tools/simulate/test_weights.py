"""Simulated links: how long engines pause, and which version they serve afterwards."""

import asyncio
from collections.abc import Iterator

import pytest

from mcore_rl.run.roles.parity_check import make_probe
from mcore_rl.tools.simulate.engine import SimulatedEngine
from mcore_rl.tools.simulate.kv_cache import EngineSpeed
from mcore_rl.tools.simulate.ranks import (
    JOIN_S,
    MEET_S,
    TRACE_S,
    SimulatedEngineMemory,
    SimulatedLinks,
    SimulatedParityCheck,
    link_seconds_of,
)
from mcore_rl.tools.simulate.virtual_time import VirtualLoop
from mcore_rl.types import VersionSpan, WeightVersion

SPEED = EngineSpeed([0.0, 0.01], 0.0, lambda num_tokens: 0.0, 1000)


def no_time(num_engines: int) -> float:
    return 0.0


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
    links = SimulatedLinks({"http://e": engine}, 2.0, 0.5, 1000, staged=staged, link_s=no_time)

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


@pytest.mark.parametrize(
    ("verify_every", "read_back"),
    [(3, [1, 1, 1, 1, 0, 0, 1]), (1, [1] * 7), (10, [1, 1, 1, 1, 0, 0, 0]), (0, [0] * 7)],
)
def test_a_sync_that_is_read_back_pauses_longer(
    loop: VirtualLoop, verify_every: int, read_back: list[int]
) -> None:
    engine = SimulatedEngine(loop, "http://e", SPEED, WeightVersion(0))
    verify = {"read_back_s": 0.25, "verify_every": verify_every}
    links = SimulatedLinks({"http://e": engine}, 2.0, 0.5, 8, staged=True, link_s=no_time, **verify)
    loop.run_until_complete(links.connect(["http://e"]))
    for version, is_read_back in enumerate(read_back):
        began_s = loop.time()
        metrics = loop.run_until_complete(links.sync(version)).metrics()
        assert metrics["sync/engines_verified"] == is_read_back
        assert metrics["sync/pause_s"] == 0.5 + 0.25 * is_read_back
        assert loop.time() - began_s == metrics["sync/seconds"] == 2.5 + 0.25 * is_read_back


def test_only_a_new_link_is_read_back_beside_older_ones(loop: VirtualLoop) -> None:
    engines = {url: SimulatedEngine(loop, url, SPEED, WeightVersion(0)) for url in ("a", "b")}
    verify = {"read_back_s": 0.25, "verify_every": 10}
    links = SimulatedLinks(engines, 2.0, 0.5, 8, staged=True, link_s=no_time, **verify)

    async def run() -> None:
        await links.connect(["a", "b"])
        for version in range(4):
            await links.sync(version)
        await links.connect(["b"])
        report = await links.sync(4)
        assert report.verified == {"b"} and report.seconds == 2.75
        assert [result.pause_seconds for result in report.engines] == [0.5, 0.75]

    loop.run_until_complete(run())
    assert links.in_rotation == ("a", "b")


def test_a_sync_waits_for_the_step_of_an_engine_that_decodes(loop: VirtualLoop) -> None:
    engine = SimulatedEngine(loop, "http://e", SPEED, WeightVersion(0))
    engines = {"http://e": engine}
    links = SimulatedLinks(engines, 2.0, 0.5, 8, staged=True, waits=True, link_s=no_time)
    parity_check = SimulatedParityCheck(lambda name, predict: None, 0.3, engines)

    async def run(busy: bool) -> float:
        began_s = loop.time()
        asking = asyncio.create_task(engine.sample(0, 1, 400 if busy else 1, 400))
        await asyncio.sleep(1.0)
        await links.sync(1, ["http://e"])
        await parity_check.check(["http://e"])
        seconds = loop.time() - began_s - 1.0
        await asking
        return seconds

    assert loop.run_until_complete(run(busy=False)) == pytest.approx(2.8)
    assert loop.run_until_complete(run(busy=True)) == pytest.approx(2.8 + 2 * SPEED.fixed_s[1])


def test_an_engine_that_missed_a_sync_is_out_of_rotation(loop: VirtualLoop) -> None:
    engines = {
        url: SimulatedEngine(loop, url, SPEED, WeightVersion(0)) for url in ("http://a", "http://b")
    }
    links = SimulatedLinks(engines, 1.0, 0.1, 8, staged=True, link_s=no_time)

    async def run() -> None:
        await links.connect(list(engines))
        await links.sync(1)
        await links.sync(2, ["http://b"])

    loop.run_until_complete(run())
    assert links.linked == ("http://a", "http://b")
    assert links.in_rotation == ("http://b",)


def test_a_parity_check_takes_time_and_finds_no_difference(loop: VirtualLoop) -> None:
    spent = []
    parity_check = SimulatedParityCheck(lambda name, predict: spent.append(predict()), 0.5)
    parity_check.score_sequences(WeightVersion(1), make_probe((), 0))
    report = loop.run_until_complete(parity_check.check(["http://a"]))
    assert report.differences["http://a"].mean == 0.0 and not report.failed
    assert spent == [0.5] and loop.time() == 0.5


def test_only_shared_gpus_take_time_to_change_hands(loop: VirtualLoop) -> None:
    for are_colocated in (False, True):
        began_s = loop.time()
        memory = SimulatedEngineMemory(are_colocated=are_colocated, call_s=2.0)
        for change in (memory.for_training, memory.for_sync, memory.for_rollout):
            loop.run_until_complete(change())
        assert loop.time() - began_s == (6.0 if are_colocated else 0.0)


def test_engines_are_linked_at_once_in_a_time_that_grows_with_the_ranks_of_all_links(
    loop: VirtualLoop,
) -> None:
    of_small = link_seconds_of(3)
    assert of_small(1) == pytest.approx(TRACE_S + 3 * MEET_S + JOIN_S)
    assert of_small(16) - TRACE_S == pytest.approx(16 * (of_small(1) - TRACE_S))
    large = link_seconds_of(288)
    engines = {url: SimulatedEngine(loop, url, SPEED, WeightVersion(0)) for url in ("a", "b")}
    links = SimulatedLinks(engines, 1.0, 0.1, 8, staged=True, link_s=large)
    loop.run_until_complete(links.connect(["a", "b"]))
    assert loop.time() == pytest.approx(large(2))
    assert links.linked == ("a", "b")
    # An engine that was started again is linked by itself.
    loop.run_until_complete(links.connect(["b"]))
    assert loop.time() == pytest.approx(large(2) + large(1))
