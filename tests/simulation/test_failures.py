"""Failures: how often they come, and what they take down."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.simulation.engine import SimulatedEngine
from mcore_rl.simulation.engine_request import EngineSpeed
from mcore_rl.simulation.failures import Failures, RunLostError
from mcore_rl.simulation.virtual_loop import VirtualLoop
from mcore_rl.types import WeightVersion

SPEED = EngineSpeed([0.0, 0.01], 0.0, lambda num_tokens: 0.0, 1000)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def failures_of(
    loop: VirtualLoop, num_trainer_gpus: int, *overrides: str
) -> tuple[Failures, EngineHealth]:
    config = load_recipe("qwen3_30b_a3b_grpo_32", ["simulate.mtbf_hours=100", *overrides])
    urls = [f"http://e-{k}" for k in range(config.rollout.engines)]
    engines = {url: SimulatedEngine(loop, url, SPEED, WeightVersion(0)) for url in urls}
    health = EngineHealth(urls)
    draw = random.Random(3)
    return Failures(loop, config, engines, health, num_trainer_gpus, draw), health


def wait(loop: VirtualLoop, hours: float) -> Any:
    return loop.run_until_complete(asyncio.sleep(3600 * hours))


def test_engines_fail_as_often_as_their_gpus_and_come_back(loop: VirtualLoop) -> None:
    failures, health = failures_of(loop, 0, "rollout.restarts=100000")
    wait(loop, 5000)
    # Four engines of four GPUs: one failure every 100 / 16 hours.
    assert failures.num_engines_lost == pytest.approx(5000 * 16 / 100, rel=0.1)
    assert sum(state.restarts for state in health.states) == failures.num_engines_lost
    assert not failures.lost.done()
    failures.end()


def test_an_engine_without_restarts_left_ends_the_run(loop: VirtualLoop) -> None:
    failures, _ = failures_of(loop, 0, "rollout.restarts=0")
    with pytest.raises(RunLostError, match=r"failed, and was started again rollout\.restarts=0"):
        loop.run_until_complete(failures.lost)
    failures.end()


def test_a_trainer_gpu_ends_the_run(loop: VirtualLoop) -> None:
    failures, _ = failures_of(loop, 16_000, "rollout.restarts=100000")
    with pytest.raises(RunLostError, match="a GPU of the trainer failed"):
        loop.run_until_complete(failures.lost)
    assert loop.time() < 3600
    failures.end()
