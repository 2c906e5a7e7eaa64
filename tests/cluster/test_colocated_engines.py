"""Engines on the GPUs of trainer ranks that are lost, and start again where these ranks are."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.util.placement_group import remove_placement_group

from mcore_rl.cluster.answers import RankDiedError, RankError
from mcore_rl.cluster.colocated_engines import ColocatedEngines, Returns
from mcore_rl.cluster.model_groups import CriticGroup, TrainerGroup
from mcore_rl.cluster.placement import Seat, reserve, wait_for_room
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import (
    ClusterConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.planning.slots import colocate_engines, colocate_ranks, divide
from mcore_rl.process.errors import ProcessLostError
from mcore_rl.rollout.engine_health import EngineState
from mcore_rl.rollout.engine_spec import EngineAddress, EngineSpec
from mcore_rl.workers.engine_worker import RestartCounts
from mcore_rl.workers.model_worker import ModelSpec
from tests.support.cluster_workers import Place
from tests.support.imaginary_gpus import four_imaginary_gpus

pytestmark = pytest.mark.e2e


class ServerlessWorker:
    """Does what EngineWorker does, without a server: its address has its process id and GPUs."""

    def __init__(
        self,
        spec: EngineSpec,
        engine: int,
        startup_timeout_s: float,
        max_restarts: int,
        stopped_s: float,
        find_address: Callable[[], str],
    ) -> None:
        self._url = f"http://{find_address()}:{os.getpid()}/{','.join(spec.gpu_ids)}"
        self._engine = engine
        self._dead = Path(spec.log_path).with_suffix(".dead")

    def address(self) -> EngineAddress:
        return EngineAddress(self._url, "", number=self._engine)

    def pid(self) -> int:
        return os.getpid()

    def check(self, restarts: Sequence[RestartCounts], may_be_silent: bool) -> EngineState:
        if self._dead.exists():
            self._dead.unlink()
            raise ProcessLostError("the server died (status -9)")
        return EngineState(self._url)


class Engines(ColocatedEngines):
    worker_cls = ServerlessWorker


class Scene:
    """Two trainer ranks without a model, each with an engine on its GPU and room for a third."""

    def __init__(self, folder: Path, gpus_per_node: int) -> None:
        self.folder = folder
        [slots] = reserve([plan_ranks(2, 1.5, gpus_per_node)], timeout_s=60)
        self.slots = divide(slots, 3)
        engine_slots = colocate_engines(self.slots, 2, 1)
        self.engines = Engines(engine_slots, folder, call_timeout_s=60, min_engines=2)
        self.start_ranks()
        gpus = [gpu for of_rank in self.trainer.gpu_ids() for gpu in of_rank]
        specs = [EngineSpec("model", str(folder / f"{k}.log")) for k in range(2)]
        self.engines.start_build(specs, 60, gpu_ids=gpus)
        self.urls = [engine.url for engine in self.engines.wait_built()]

    def start_ranks(self) -> None:
        self.trainer = TrainerGroup(self.slots, self.folder, call_timeout_s=60)

    def let_return(self, most: int = 4) -> None:
        returns = Returns(lambda: self.trainer.find_seats(), lambda: True, most)
        self.engines.return_with(returns)

    def look(self) -> None:
        asyncio.run(self.engines.look())

    def bring_back(self) -> list[str]:
        async def start() -> list[str]:
            return await self.engines.start_lost() if await self.engines.seat_lost() else []

        return asyncio.run(start())

    def kill(self, engine: int) -> None:
        os.kill(self.engines.server_pids()[engine], signal.SIGKILL)

    def end_server(self, engine: int) -> None:
        (self.folder / f"{engine}.dead").touch()


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    with four_imaginary_gpus():
        yield


@pytest.fixture
def on_gpus(four_gpus: None, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, gpus_per_node=4)
    yield scene
    remove_placement_group(scene.slots[0].group)


def test_an_engine_that_is_lost_starts_again_on_its_gpu(on_gpus: Scene) -> None:
    scene, health = on_gpus, on_gpus.engines.health
    scene.engines.find_home = lambda engine: 5 + engine
    assert [url[-2:] for url in scene.urls] == ["/0", "/1"]
    scene.end_server(0)
    with pytest.raises(RankError, match=r"the server died \(status -9\)"):
        scene.look()  # nothing brings it back
    scene.let_return(most=2)
    assert scene.bring_back() == [], "none is lost"
    scene.end_server(1)
    scene.look()
    assert scene.engines.list_living() == scene.urls[:1] and health.num_coming == 1
    assert "the server died" in health.why_out(scene.urls[1])
    [url] = scene.bring_back()
    assert url != scene.urls[1] and url[-2:] == "/1"
    assert scene.engines.list_living() == [scene.urls[0], url] and health.num_coming == 0
    assert health.take_left() == [scene.urls[1]] and health.serving == [scene.urls[0]]
    [joined] = health.rotation.joined.values()
    assert (joined.home, joined.address.number) == (6, 1)
    scene.look()
    scene.kill(1)
    scene.look()
    os.kill(scene.trainer.pids()[0], signal.SIGKILL)
    with pytest.raises(RankDiedError, match="trainer rank 0 died"):
        scene.bring_back()
    scene.start_ranks()
    [again] = scene.bring_back()
    assert again != url and again[-2:] == "/1"
    scene.kill(1)
    scene.look()
    with pytest.raises(RankError, match=r"(?s)engine rank 1 died .*started 2 times in an hour"):
        scene.bring_back()
    scene.engines._min_engines = 1

    async def find_first() -> dict[int, Seat]:
        return {0: (await scene.trainer.find_seats())[0]}

    scene.engines.return_with(Returns(find_first, lambda: True, most=9))
    assert scene.bring_back() == [] and health.num_coming == 0, "its rank is left out"
    scene.let_return(most=9)
    assert len(scene.bring_back()) == 1, "there are more ranks again"
    scene.look()
    assert len(scene.engines.list_living()) == 2 and health.num_coming == 0


class GpuWorker:
    """A rank that knows its GPUs."""

    def __init__(self, spec: ModelSpec, rank: int, address: str, port: int, gpus: Any, _: Any):
        self._rank, self._gpus = rank, gpus

    def coordinate(self) -> Place:
        return Place(dp=self._rank, tp=0, owns_output=True)

    def tell_gpus(self) -> Sequence[str]:
        return self._gpus


class Critic(CriticGroup):
    worker_cls = GpuWorker  # pyright: ignore[reportAssignmentType]

    def tell_gpus(self) -> list[Sequence[str]]:
        return self._call("tell_gpus")


def test_ranks_follow_those_whose_gpus_they_share(on_gpus: Scene, tmp_path: Path) -> None:
    """A rank whose node is lost may get another GPU on the spare one."""
    trainer = on_gpus.trainer
    gpus = trainer.list_gpus()
    critic = Critic(colocate_ranks(on_gpus.slots, 2), tmp_path, call_timeout_s=60)
    parts = ModelConfig(), ParallelConfig(dp=2), TrainConfig(), OptimizerConfig()
    critic.start_build(ModelSpec(*parts, 1, 0, None, 60.0), 60, lambda: gpus)
    critic.wait_built()
    assert critic.tell_gpus() == trainer.gpu_ids() == list(gpus.values())
    gpus = {0: ("7",)}  # the ranks are fewer, and on another node
    critic.restart()
    assert critic.tell_gpus() == [("7",), trainer.gpu_ids()[1]]
    critic._group.kill()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The controller's node, and three with room for a rank and an engine each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        made.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 << 20)
    with open_ray_session(ClusterConfig(address=made.address, num_nodes=4)):
        yield made
    made.shutdown()


@pytest.mark.slow
def test_an_engine_of_a_lost_node_follows_its_rank_to_a_spare_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, gpus_per_node=1)
    scene.let_return()
    before = asyncio.run(find_nodes(scene))
    [lost] = (node for node in cluster.list_all_nodes() if node.node_id == before[1])
    cluster.remove_node(lost, allow_graceful=False)
    until_s = time.monotonic() + 60
    while len(scene.engines.list_living()) == 2:
        scene.look()
        assert time.monotonic() < until_s, "nobody sees that the engine is lost"
    with pytest.raises(RankError, match=r"trainer rank 1 .*died"):
        scene.bring_back()
    wait_for_room(scene.slots)
    scene.start_ranks()
    assert len(scene.bring_back()) == 1
    found = asyncio.run(find_nodes(scene))
    assert found[0] == before[0] and found[1] not in before
    engines = scene.engines._group
    assert [asyncio.run(engines.find_node(k, 60.0)) for k in (0, 1)] == found
    scene.look()
    assert scene.engines.health.num_coming == 0 and len(scene.engines.list_living()) == 2


async def find_nodes(scene: Scene) -> list[str]:
    return [seat.node for seat in (await scene.trainer.find_seats()).values()]
