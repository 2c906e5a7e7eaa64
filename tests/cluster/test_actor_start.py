"""Actors that answer in threads: calls that move much do not hold up the others."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from mcore_rl.cluster.answers import Rank
from mcore_rl.cluster.group import BULK, BULK_THREADS, ActorPlan, start_actor
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.planning.slots import Slot
from mcore_rl.process.cores import num_cores

pytestmark = pytest.mark.e2e


class Computer:
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()


class Sleeper:
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"


@pytest.fixture
def slot() -> Iterator[Slot]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=2):
        [[slot]] = reserve([plan_ranks(1, 0.5, gpus_per_node=0)], timeout_s=20)
        yield slot


def test_a_call_passes_those_that_move_much(slot: Slot, tmp_path: Path) -> None:
    rank = Rank("collector", 0, tmp_path / "collector_rank0.log")
    actor = start_actor(ActorPlan.make(rank, slot, None, threads=2))
    assert ray.get(actor.build.remote(30, Sleeper), timeout=60) is None
    bulk = actor.call.options(concurrency_group=BULK)
    busy = [bulk.remote(60, "sleep", 20.0) for _ in range(2 * BULK_THREADS)]
    began_s = time.monotonic()
    assert ray.get(actor.call.remote(60, "sleep", 0.1), timeout=15) == "awake"
    assert time.monotonic() - began_s < 10
    assert ray.wait(busy, num_returns=1, timeout=0)[0] == []
    ray.kill(actor)


@pytest.mark.slow
def test_a_process_computes_with_its_part_of_the_cores(
    slot: Slot, tmp_path: Path, monkeypatch
) -> None:
    def num_threads(sharers: int) -> int:
        rank = Rank("trainer", sharers, tmp_path / f"{sharers}.log")
        own = replace(slot, sharers=sharers)
        actor = start_actor(ActorPlan.make(rank, own, None, threads=1))
        assert ray.get(actor.build.remote(60, Computer), timeout=60) is None
        [found] = ray.get([actor.call.remote(60, "threads")], timeout=60)
        ray.kill(actor)
        return found

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert num_threads(1) == num_cores()
    assert num_threads(0) == num_threads(num_cores()) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert num_threads(1) == 1
