"""Failures: how often they come, and what they take down."""

import asyncio
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.bundles import RunSize
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.tools.simulate.engine import SimulatedCollector, SimulatedEngine, SimulatedTransport
from mcore_rl.tools.simulate.kv_cache import EngineSpeed
from mcore_rl.tools.simulate.placement import (
    Failures,
    ProcessPlacement,
    RanksLostError,
    RunLostError,
)
from mcore_rl.tools.simulate.virtual_time import VirtualLoop
from mcore_rl.tools.simulate.workload import Workload
from mcore_rl.types import WeightVersion

SPEED = EngineSpeed([0.0, 0.01], 0.0, lambda num_tokens: 0.0, 1000)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def failures_of(
    loop: VirtualLoop, num_trainer_gpus: int, *overrides: str, most_recoveries: int = 0
) -> tuple[Failures, EngineHealth]:
    config = load_recipe("qwen3_30b_a3b_grpo_32", ["simulate.mtbf_hours=100", *overrides])
    urls = [f"http://e-{k}" for k in range(config.rollout.engines)]
    engines = {url: SimulatedEngine(loop, url, SPEED, WeightVersion(0)) for url in urls}
    health = EngineHealth(urls)
    size = RunSize.make(config, "train")
    hardware = config.simulate.cores, config.plan.ranks_per_host
    placement = ProcessPlacement.make(loop, size, config.rollout, config.cluster, *hardware)
    transport = SimulatedTransport(
        engines, Workload(config.simulate, config.rollout.max_response_len, config.run.seed)
    )
    addresses = [EngineAddress(url, "") for url in urls]
    collectors = {
        nodes[0]: SimulatedCollector(loop, config.rollout, addresses, urls, transport)
        for nodes in placement.engine_nodes
    }
    draw = random.Random(3)
    failures = Failures(
        loop,
        config.rollout,
        config.simulate,
        engines,
        health,
        placement,
        collectors,
        num_trainer_gpus,
        draw,
        most_recoveries,
        in_turn=config.cluster.colocated,
    )
    return failures, health


def without_gpu_failures(
    loop: VirtualLoop, *overrides: str, most_recoveries: int = 0
) -> tuple[Failures, EngineHealth]:
    overrides = ("simulate.mtbf_hours=0", *overrides)
    return failures_of(loop, 16, *overrides, most_recoveries=most_recoveries)


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


def test_a_machine_takes_its_engines_for_good(loop: VirtualLoop) -> None:
    """Two machines of eight GPUs have ranks, two have two engines of four each."""
    failures, health = without_gpu_failures(loop, "simulate.engine_restart_s=1")
    failures.lose_node("node-3")
    failures.lose_node("node-3")
    wait(loop, 1)
    assert [state.lost for state in health.states] == [False, False, True, True]
    assert health.why_out("http://e-3") == "node-3 failed"
    assert failures.num_engines_lost == 2
    assert not failures.lost.done()


def test_engines_of_a_lost_machine_move_to_a_spare_one(loop: VirtualLoop) -> None:
    options = ("simulate.spare_nodes=1", "simulate.notice_s=20", "simulate.engine_restart_s=100")
    failures, health = without_gpu_failures(loop, *options)
    failures.lose_node("node-3")
    failures.lose_node("node-2")
    loop.run_until_complete(asyncio.sleep(119))
    assert [state.healthy for state in health.states] == [False, False, False, False]
    loop.run_until_complete(asyncio.sleep(2))
    assert [state.healthy for state in health.states] == [False, False, True, True]
    assert [state.lost for state in health.states] == [True, True, False, False]
    assert failures.num_engines_lost == 4 and not failures.lost.done()


SHARED = (
    *("rollout.mode=sync", "rollout.stage_weights=false", "cluster.colocated=true"),
    *("rollout.restarts=0", "simulate.spare_nodes=1", "simulate.engine_restart_s=100"),
)


def test_engines_on_gpus_of_ranks_wait_for_their_turn(loop: VirtualLoop) -> None:
    """The machine has ranks and two engines; a spare one takes its place once."""
    failures, health = without_gpu_failures(loop, *SHARED, most_recoveries=4)
    assert not loop.run_until_complete(failures.seat_lost())
    failures.lose_node("node-0")
    with pytest.raises(RanksLostError, match="node-0 failed, which has ranks"):
        loop.run_until_complete(failures.ranks_lost)
    failures.replace_ranks()
    wait(loop, 1)
    assert [state.healthy for state in health.states] == [False, False, True, True]
    assert loop.run_until_complete(failures.seat_lost())
    began_s = loop.time()
    loop.run_until_complete(failures.start_lost())
    assert loop.time() - began_s == 100
    assert all(state.healthy for state in health.states)
    assert not loop.run_until_complete(failures.seat_lost()) and not failures.lost.done()
    failures.lose_node("node-1")
    with pytest.raises(RunLostError, match="node-1 failed, which has ranks"):
        loop.run_until_complete(failures.lost)


def test_engines_on_gpus_of_ranks_start_as_often_as_ranks_are_recovered(loop: VirtualLoop) -> None:
    failures, _ = failures_of(loop, 0, *SHARED, "simulate.mtbf_hours=1", most_recoveries=2)
    while not failures.lost.done():
        wait(loop, 0.01)
        if loop.run_until_complete(failures.seat_lost()):
            loop.run_until_complete(failures.start_lost())
    with pytest.raises(RunLostError, match="failed once more than 2 times an hour"):
        failures.lost.result()
    failures.end()


def test_a_machine_in_the_place_of_a_lost_one_fails_as_often(loop: VirtualLoop) -> None:
    options = ("simulate.node_mtbf_hours=100", "simulate.spare_nodes=1000000")
    failures, _ = without_gpu_failures(
        loop, *options, "rollout.restarts=100000", most_recoveries=10**6
    )
    wait(loop, 10_000)
    # Four machines: one fails every 25 hours.
    assert failures.num_nodes_lost == pytest.approx(400, rel=0.15)
    failures.end()


def test_too_few_engines_left_end_the_run(loop: VirtualLoop) -> None:
    failures, _ = without_gpu_failures(loop, "rollout.min_engines=3")
    failures.lose_node("node-2")
    message = r"node-2 failed, and 2 engines are left of rollout\.min_engines=3"
    with pytest.raises(RunLostError, match=message):
        loop.run_until_complete(failures.lost)


def test_a_machine_with_ranks_ends_the_run(loop: VirtualLoop) -> None:
    failures, _ = without_gpu_failures(loop)
    failures.lose_node("node-1")
    with pytest.raises(RunLostError, match="node-1 failed, which has ranks of the trainer"):
        loop.run_until_complete(failures.lost)


def test_a_spare_machine_takes_the_place_of_one_with_ranks_once(loop: VirtualLoop) -> None:
    failures, _ = without_gpu_failures(loop, "simulate.spare_nodes=1", most_recoveries=4)
    failures.lose_node("node-1")
    with pytest.raises(RanksLostError, match="node-1 failed, which has ranks of the trainer"):
        loop.run_until_complete(failures.ranks_lost)
    failures.replace_ranks()
    assert not failures.lost.done() and not failures.ranks_lost.done()
    failures.lose_node("node-0")
    with pytest.raises(RunLostError, match="node-0 failed"):
        loop.run_until_complete(failures.lost)


def test_too_many_recoveries_within_an_hour_end_the_run(loop: VirtualLoop) -> None:
    failures, _ = failures_of(loop, 16_000, "rollout.restarts=100000", most_recoveries=3)
    for _ in range(3):
        with pytest.raises(RanksLostError, match="a GPU of the trainer failed"):
            loop.run_until_complete(failures.ranks_lost)
        failures.replace_ranks()
    with pytest.raises(RunLostError):
        loop.run_until_complete(failures.lost)
    assert failures.num_recoveries == 3 and loop.time() < 3600
    failures.end()


def test_machines_fail_at_their_rate(loop: VirtualLoop) -> None:
    options = ("simulate.node_mtbf_hours=100", "rollout.engines=400")
    failures, _ = without_gpu_failures(loop, *options)
    wait(loop, 100)
    # 200 machines of engines and two of ranks: each is still there with probability 1/e.
    assert failures.num_nodes_lost == pytest.approx(202 * (1 - math.exp(-1)), rel=0.15)
    failures.end()
