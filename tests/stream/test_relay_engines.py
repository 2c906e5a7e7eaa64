"""Two real engines with equal layouts: the second gets what the first passes on, or what trainers send."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.rollout.engine import EngineProcess, EngineSpec
from mcore_rl.stream.engine_control import LOADER
from mcore_rl.stream.refit import Refitter
from tests.slices.megatron_layout import TrainLayout
from tests.stream.ranks import ProcessRanks
from tests.stream.test_refit import (
    Stage,
    checksums,
    checksums_after_loading,
    save_checkpoints,
    served_version,
)

pytestmark = pytest.mark.e2e

TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("relay")
    checkpoints = save_checkpoints(folder)
    engines = [
        EngineProcess(
            EngineSpec(
                str(checkpoints[0]),
                str(folder / f"engine{i}.log"),
                kv_cache_len=4096,
                max_running=8,
                custom_weight_loaders=(LOADER,),
            )
        )
        for i in range(2)
    ]
    ranks = ProcessRanks(TrainLayout(tp=2, ep=2))
    try:
        for engine in engines:
            engine.start()
        ranks.load(checkpoints[0])
        for engine in engines:
            engine.wait_healthy()
        refitter = Refitter(ranks, bucket_mib=0.0625, timeout_s=TIMEOUT_S)
        asyncio.run(refitter.connect([engine.url for engine in engines]))
        yield Stage(checkpoints, engines, ranks, refitter)
    finally:
        ranks.stop()
        for engine in engines:
            engine.stop()


def scheduler_of(engine: EngineProcess) -> int:
    children = psutil.Process(engine.pid).children(recursive=True)
    return next(child.pid for child in children if "scheduler" in " ".join(child.cmdline()))


def test_both_engines_hold_the_version_and_the_trainer_sent_it_once(stage: Stage) -> None:
    expected = checksums_after_loading(stage.urls[0], stage.checkpoints[1])
    for version in (1, 2, 3):
        report = stage.sync(version)
        assert not report.failed
        assert [refit.upstream for refit in report.engines] == [None, stage.urls[0]]
        sizes = report.metrics()
        assert sizes["refit/mib"] == 2 * sizes["refit/trainer_mib"] > 0
        assert [served_version(url) for url in stage.urls] == [str(version)] * 2
    found = [checksums(url) for url in stage.urls]
    for name, wanted in expected[0].items():
        assert [ranks[0][name] for ranks in found] == [wanted, wanted], name


def test_an_engine_behind_one_that_hangs_is_sent_its_slices_by_the_trainer(stage: Stage) -> None:
    head, tail = stage.urls
    hanging = scheduler_of(stage.engines[0])
    os.kill(hanging, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        report = stage.sync(4)
        assert time.monotonic() - began_s < 2 * TIMEOUT_S + 15
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert set(report.failed) == {head}
    assert stage.refitter.in_rotation == (tail,)
    assert (served_version(tail), report.engines[1].upstream) == ("4", None)
    asyncio.run(stage.refitter.connect([head]))
    report = stage.sync(5)
    assert not report.failed
    assert report.engines[1].upstream is not None
    first, second = (checksums(url) for url in stage.urls)
    assert first == second


def test_an_engine_behind_one_that_dies_is_sent_its_slices_by_the_trainer(stage: Stage) -> None:
    head = 1 if stage.refitter.linked[0] == stage.urls[1] else 0
    dying, other = stage.urls[head], stage.urls[1 - head]
    os.kill(scheduler_of(stage.engines[head]), signal.SIGKILL)
    report = stage.sync(6)
    assert set(report.failed) == {dying}
    assert stage.refitter.in_rotation == (other,)
    assert served_version(other) == "6"
    assert checksums(other) == checksums_after_loading(other, Path(stage.checkpoints[0]))
