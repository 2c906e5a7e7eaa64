"""In-place syncs: engines are paused for the transfer, and resume only with whole weights."""

import asyncio

from mcore_rl.tools.doctor.toy_engine import Fault
from mcore_rl.weight_sync.controller.strategy import InPlaceSync
from mcore_rl.weight_sync.controller.sync import SyncController
from tests.support.thread_engines import open_thread_stage

TIMEOUT_S = 60.0


def test_engines_hold_and_serve_each_version() -> None:
    with open_thread_stage(1, 2) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S, staged=False)
        assert isinstance(controller._strategy, InPlaceSync)
        asyncio.run(controller.connect(stage.urls))
        for version in (1, 2):
            stage.trainers.load(version)
            report = asyncio.run(controller.sync(version))
            assert not report.failed
            for engine in stage.engines:
                assert engine.holds(version)
                assert engine.version == str(version)
                assert not engine.is_paused and not engine.is_updating
        order = [path for path in stage.engines[0].calls if "info" not in path][-6:]
        assert order[:3] == [
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_tensor",
        ]
        assert set(order[3:5]) == {"/end_weight_update", "/update_weight_version"}
        assert order[5:] == ["/continue_generation"]


def test_an_engine_that_got_a_changed_byte_stays_paused_and_the_other_serves() -> None:
    with open_thread_stage(1, 1) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S, staged=False)
        bad, good = stage.engines
        stage.faults["", bad.url] = Fault(rank=1, message=0, kind="corrupt")
        asyncio.run(controller.connect(stage.urls))
        stage.trainers.load(1)
        report = asyncio.run(controller.sync(1))
        assert set(report.failed) == {bad.url}
        assert "has checksum" in report.failed[bad.url]
        assert bad.is_paused and bad.version == "default"
        assert good.holds(1) and not good.is_paused
        assert controller.in_rotation == (good.url,)

        stage.faults.clear()
        asyncio.run(controller.connect([bad.url]))
        assert bad.is_paused, "its parameters may mix versions until a sync succeeds"
        assert not asyncio.run(controller.sync(1)).failed
        assert bad.holds(1) and not bad.is_paused


def test_an_engine_that_refuses_to_pause_is_left_out_of_the_transfer() -> None:
    with open_thread_stage(1, 1) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S, staged=False)
        asyncio.run(controller.connect(stage.urls))
        bad, good = stage.engines
        bad.refused.add("/pause_generation")
        stage.trainers.load(1)
        report = asyncio.run(controller.sync(1))
        assert "refused /pause_generation" in report.failed[bad.url]
        assert good.holds(1)
        assert report.serving == (good.url,)
