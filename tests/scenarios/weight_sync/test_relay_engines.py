"""Two real engines of equal layouts: the first is a relay; without it, trainer ranks send."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.rollout.engine import EngineProcess
from tests.support.sync_stage import (
    Stage,
    checksums,
    checksums_after_loading,
    open_stage,
    served_version,
)

pytestmark = pytest.mark.e2e

TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("relay"), (1, 1), TIMEOUT_S) as stage:
        yield stage


def scheduler_of(engine: EngineProcess) -> int:
    """Process id of the engine's only rank."""
    children = psutil.Process(engine.pid).children(recursive=True)
    return next(child.pid for child in children if "scheduler" in " ".join(child.cmdline()))


def test_both_engines_hold_the_version_and_the_trainer_sent_it_once(stage: Stage) -> None:
    expected = checksums_after_loading(stage.urls[0], stage.checkpoints[1])
    for version in (1, 2, 3):
        report = stage.sync(version)
        assert not report.failed
        assert [result.relay for result in report.engines] == [None, stage.urls[0]]
        sizes = report.metrics()
        assert sizes["sync/mib"] == 2 * sizes["sync/trainer_mib"] > 0
        assert [served_version(url) for url in stage.urls] == [str(version)] * 2
    found = [checksums(url) for url in stage.urls]
    for name, wanted in expected[0].items():
        assert [ranks[0][name] for ranks in found] == [wanted, wanted], name


@pytest.mark.slow
def test_the_trainer_sends_to_an_engine_behind_a_relay_that_hangs(stage: Stage) -> None:
    relay, behind = stage.urls
    hanging = scheduler_of(stage.engines[0])
    os.kill(hanging, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        report = stage.sync(4)
        assert time.monotonic() - began_s < 2 * TIMEOUT_S + 15
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert set(report.failed) == {relay}
    assert stage.sync_controller.in_rotation == (behind,)
    assert (served_version(behind), report.engines[1].relay) == ("4", None)
    asyncio.run(stage.sync_controller.connect([relay]))
    report = stage.sync(5)
    assert not report.failed
    assert report.engines[1].relay is not None
    first, second = (checksums(url) for url in stage.urls)
    assert first == second


@pytest.mark.slow
def test_the_trainer_sends_to_an_engine_behind_a_relay_that_dies(stage: Stage) -> None:
    first = stage.urls.index(stage.sync_controller.linked[0])
    dying = stage.urls[first]
    other = stage.urls[1 - first]
    os.kill(scheduler_of(stage.engines[first]), signal.SIGKILL)
    report = stage.sync(6)
    assert set(report.failed) == {dying}
    assert stage.sync_controller.in_rotation == (other,)
    assert served_version(other) == "6"
    assert checksums(other) == checksums_after_loading(other, Path(stage.checkpoints[0]))
