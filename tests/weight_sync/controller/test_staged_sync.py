"""Staged syncs: engines of equal layouts form a chain, and a pause is for the swap alone."""

import asyncio
import time

from mcore_rl.tools.doctor.toy_engine import Fault
from mcore_rl.weight_sync.controller.strategy import StagedSync
from mcore_rl.weight_sync.controller.sync import SyncController
from tests.support.thread_engines import open_thread_stage

TIMEOUT_S = 60.0


def test_engines_of_equal_layouts_are_relays_and_cost_the_trainer_one_copy() -> None:
    with open_thread_stage(2, 1, 2, 2) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S)
        assert isinstance(controller._strategy, StagedSync)
        asyncio.run(controller.connect(stage.urls))
        a, other, b, c = stage.engines
        for version in (1, 2):
            stage.trainers.load(version)
            report = asyncio.run(controller.sync(version))
            assert not report.failed
            relays = {result.url: result.relay for result in report.engines}
            assert relays == {a.url: None, other.url: None, b.url: a.url, c.url: b.url}
            assert [result.url for result in report.engines] == stage.urls
            for engine in stage.engines:
                assert engine.holds(version)
                assert engine.version == str(version)
                assert not engine.is_paused
        sizes = {result.url: result.num_bytes for result in report.engines}
        metrics = report.metrics()
        assert metrics["sync/trainer_mib"] * 2**20 == sizes[a.url] + sizes[other.url]
        assert metrics["sync/mib"] * 2**20 == sum(sizes.values())


def test_without_relays_the_trainer_sends_to_every_engine() -> None:
    with open_thread_stage(1, 1) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S, relay=False)
        asyncio.run(controller.connect(stage.urls))
        stage.trainers.load(3)
        report = asyncio.run(controller.sync(3))
        assert [result.relay for result in report.engines] == [None, None]
        assert all(engine.holds(3) for engine in stage.engines)


def test_the_trainer_sends_to_the_engines_behind_a_relay_that_sent_a_changed_byte() -> None:
    with open_thread_stage(1, 1, 1) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S)
        relay, behind, last = stage.engines
        stage.faults[relay.url, behind.url] = Fault(rank=0, message=1, kind="corrupt")
        asyncio.run(controller.connect(stage.urls))
        stage.trainers.load(1)
        began_s = time.monotonic()
        report = asyncio.run(controller.sync(1))
        assert time.monotonic() - began_s < TIMEOUT_S / 2
        assert not report.failed
        assert [result.relay for result in report.engines] == [None, None, None]
        assert all(engine.holds(1) for engine in stage.engines)

        stage.faults.clear()
        stage.trainers.load(2)
        report = asyncio.run(controller.sync(2))
        assert [result.relay for result in report.engines] == [None, relay.url, behind.url]
        assert all(engine.holds(2) for engine in (relay, behind, last))


def test_an_engine_that_fails_before_the_swap_keeps_its_weights_and_is_not_paused() -> None:
    with open_thread_stage(1, 2) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S)
        bad, good = stage.engines
        asyncio.run(controller.connect([good.url]))
        asyncio.run(controller.connect([bad.url]))
        stage.trainers.load(1)
        assert not asyncio.run(controller.sync(1)).failed
        stage.faults["", bad.url] = Fault(rank=0, message=0, kind="corrupt")
        asyncio.run(controller.connect([bad.url]))
        stage.trainers.load(2)
        report = asyncio.run(controller.sync(2))
        assert set(report.failed) == {bad.url}
        assert bad.holds(1) and bad.version == "1" and not bad.is_paused
        assert good.holds(2) and good.version == "2"
        assert controller.linked == (good.url,) == controller.in_rotation


def test_an_engine_that_fails_in_the_swap_stays_paused() -> None:
    with open_thread_stage(1, 2) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S)
        asyncio.run(controller.connect(stage.urls))
        bad, good = stage.engines
        bad.refused.add("/update_weights_from_tensor")
        stage.trainers.load(1)
        report = asyncio.run(controller.sync(1))
        assert "refused /update_weights_from_tensor" in report.failed[bad.url]
        assert bad.is_paused and not bad.is_updating and bad.version == "default"
        assert good.holds(1) and not good.is_paused
