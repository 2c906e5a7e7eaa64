"""The order in which a training run starts: groups that share GPUs one by one, others at once.

RunProcesses and SharedGpus are real. Stand-ins take the places of the groups of processes.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.cluster.outliving import Outliving
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.config import (
    AlgorithmConfig,
    ClusterConfig,
    Config,
    CriticConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.engine_spec import EngineAddress, EngineSpec
from mcore_rl.run.startup import start_training
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.workers.model_worker import ModelSpec
from tests.support.engine_keys import KEYS
from tests.support.fake_sglang import FakeSGLang

POLICY = ModelFacts.read("recipes/model/qwen3_30b_a3b")
GAE = AlgorithmConfig(advantage="gae")


@dataclass
class ModelRanks:
    """The ranks of one model, on the GPUs 4 and 5; they log what they are asked for."""

    role: str
    log: list[str]
    specs: list[ModelSpec] = field(default_factory=list)
    given_gpus: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def start_build(
        self,
        spec: ModelSpec,
        timeout_s: float,
        find_shared: Callable[[], Mapping[int, Sequence[str]]] | None = None,
    ) -> None:
        self.log.append(f"start {self.role}")
        self.specs.append(spec)
        self.given_gpus = find_shared() if find_shared is not None else {}

    def wait_built(self) -> None:
        self.log.append(f"built {self.role}")

    async def hold(self, parts: Collection[str]) -> None:
        self.log.append(f"{self.role} holds {', '.join(parts) or 'nothing'}")

    def gpu_ids(self) -> list[tuple[str, ...]]:
        return [("4",), ("5",)]

    def list_gpus(self) -> dict[int, tuple[str, ...]]:
        return dict(enumerate(self.gpu_ids()))

    async def watch(self) -> None:
        await asyncio.Event().wait()


@dataclass
class Engines:
    """A group of one engine, which is a server without a model."""

    server: FakeSGLang
    log: list[str]
    specs: list[EngineSpec] = field(default_factory=list)
    given_gpus: Sequence[str] = ()

    def start_build(
        self,
        specs: Sequence[EngineSpec],
        timeout_s: float,
        max_restarts: int,
        gpu_ids: Sequence[str],
        stopped_s: float,
    ) -> None:
        self.log.append("start engines")
        self.specs += specs
        self.given_gpus = gpu_ids

    def wait_built(self) -> list[EngineAddress]:
        self.log.append("built engines")
        return [self.server.address]

    async def watch(self) -> None:
        await asyncio.Event().wait()


class NoServedEngines:
    colocated: Collection[str] = ()

    def watches(self) -> list[Any]:
        return []


class Stage:
    """The processes of a run, and the order in which they were started."""

    def __init__(self, loop: EventLoop) -> None:
        self.log: list[str] = []
        self.loop = loop
        self.server = FakeSGLang(loop)
        self.server.answer = self._note
        self.trainer = ModelRanks("trainer", self.log)
        self.critic = ModelRanks("critic", self.log)
        self.engines = Engines(self.server, self.log)

    def _note(self, body: Any) -> None:
        if "release" in body.get("path", ""):
            self.log.append("engines release")

    def processes(self, config: Config, with_critic: bool) -> RunProcesses:
        trainer: Any = self.trainer
        critic: Any = self.critic if with_critic else None
        engines: Any = self.engines
        served: Any = NoServedEngines()
        groups = (trainer, critic, engines, None)
        made = config, POLICY, Path("logs"), self.loop, groups, served, KEYS
        return RunProcesses(*made, Outliving())


@pytest.fixture
def stage() -> Iterator[Stage]:
    loop = EventLoop()
    stage = Stage(loop)
    yield stage
    stage.server.stop()
    loop.close()


def make_config(**groups: Any) -> Config:
    return Config(model=ModelConfig(path="recipes/model/qwen3_30b_a3b"), **groups)


def test_groups_with_gpus_of_their_own_start_at_once(stage: Stage) -> None:
    config = make_config(
        run=RunConfig(steps=10),
        train=TrainConfig(epochs=2, mini_batches=4),
        critic=CriticConfig(epochs=3, warmup_steps=2),
        algorithm=GAE,
    )
    loss = make_policy_loss(config.algorithm)
    started = start_training(config, stage.processes(config, with_critic=True), loss)
    assert stage.log == [
        *("start engines", "start trainer", "start critic"),
        *("built trainer", "built critic"),
    ]
    assert started.critic is stage.critic
    assert stage.trainer.specs[0].loss is loss
    assert [ranks.specs[0].total_steps for ranks in (stage.trainer, stage.critic)] == [64, 30]
    assert stage.engines.given_gpus == [] and stage.critic.given_gpus == {}


def test_groups_that_share_gpus_start_one_by_one_and_make_room(stage: Stage) -> None:
    config = make_config(
        cluster=ClusterConfig(colocated=True, offload=True),
        rollout=RolloutConfig(stage_weights=False, restarts=0),
        critic=CriticConfig(colocated=True),
        algorithm=GAE,
    )
    loss = make_policy_loss(config.algorithm)
    start_training(config, stage.processes(config, with_critic=True), loss)
    assert stage.log == [
        *("start engines", "built engines", "engines release"),
        *("start trainer", "built trainer", "trainer holds nothing"),
        *("start critic", "built critic", "critic holds nothing"),
    ]
    assert stage.engines.given_gpus == ["4", "5"]
    assert stage.critic.given_gpus == {0: ("4",), 1: ("5",)}


def test_a_recipe_without_a_critic_starts_none(stage: Stage) -> None:
    config = make_config()
    loss = make_policy_loss(config.algorithm)
    started = start_training(config, stage.processes(config, with_critic=False), loss)
    assert started.critic is None
    assert stage.log == ["start engines", "start trainer", "built trainer"]
