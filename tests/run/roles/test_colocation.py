"""Shared GPUs: what engines and models are asked to load and offload in each phase, in order."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.run.roles.colocation import (
    ALL,
    CRITIC,
    TRAINER,
    WEIGHTS_ONLY,
    EngineMemory,
    SharedGpus,
    SharingScorer,
)
from mcore_rl.weight_sync.controller.engine_control import GRAPHS, KV_CACHE, WEIGHTS
from tests.support.fake_sglang import FakeSGLang

RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"


@dataclass
class Ranks:
    """A model's ranks; `log` is shared, so that it shows the order."""

    name: str
    log: list[tuple[str, Any]]

    async def hold(self, parts: Collection[str]) -> None:
        self.log.append((self.name, tuple(parts)))


@dataclass
class Stage:
    loop: EventLoop
    engine: FakeSGLang
    log: list[tuple[str, Any]] = field(default_factory=list)

    def engine_calls(self) -> list[tuple[str, list[str]]]:
        """The changes of memory that the engine was asked for since the last call."""
        calls = [(path, body["tags"]) for path, body in self.engine.calls if body]
        self.engine.calls.clear()
        return calls

    def memory(self) -> EngineMemory:
        return EngineMemory([self.engine.url], timeout_s=5.0)

    def model_calls(self) -> list[tuple[str, Any]]:
        calls = list(self.log)
        self.log.clear()
        return calls


@pytest.fixture
def stage() -> Iterator[Stage]:
    loop = EventLoop()
    yield Stage(loop, FakeSGLang(loop))
    loop.close()


def test_engines_release_once_they_are_idle_and_occupy_what_they_released(stage: Stage) -> None:
    memory = stage.memory()
    stage.loop.run(memory.for_training())
    assert [path for path, _ in stage.engine.calls] == ["/flush_cache", RELEASE]
    assert stage.engine_calls() == [(RELEASE, sorted([KV_CACHE, WEIGHTS]))]
    stage.loop.run(memory.for_training())
    assert stage.engine_calls() == [], "all of it is released already"
    with pytest.raises(AssertionError, match="after a sync only"):
        stage.loop.run(memory.for_rollout())
    stage.loop.run(memory.for_sync())
    stage.loop.run(memory.for_rollout())
    assert stage.engine_calls() == [(RESUME, [WEIGHTS]), (RESUME, [KV_CACHE])]
    stage.loop.run(memory.for_scoring())
    assert stage.engine_calls() == [(RELEASE, [KV_CACHE])]
    stage.loop.run(memory.restore())
    assert stage.engine_calls() == [(RESUME, [KV_CACHE])]


def test_graphs_go_and_come_with_the_kv_cache_if_engines_can_release_them(stage: Stage) -> None:
    memory = EngineMemory([stage.engine.url], timeout_s=5.0, with_graphs=True)
    stage.loop.run(memory.for_scoring())
    stage.loop.run(memory.for_training())
    stage.loop.run(memory.for_sync())
    stage.loop.run(memory.for_rollout())
    assert stage.engine_calls() == [
        (RELEASE, [GRAPHS, KV_CACHE]),
        (RELEASE, [WEIGHTS]),
        (RESUME, [WEIGHTS]),
        (RESUME, [GRAPHS, KV_CACHE]),
    ]


def test_trainer_and_critic_take_turns_and_the_other_one_offloads_first(stage: Stage) -> None:
    gpus = SharedGpus(EngineMemory((), 5.0), stage.loop.run)
    trainer, critic = Ranks(TRAINER, stage.log), Ranks(CRITIC, stage.log)
    gpus.add(TRAINER, trainer)
    assert stage.model_calls() == [(TRAINER, ())]
    gpus.add(CRITIC, critic)
    assert stage.model_calls() == [(CRITIC, ())]
    gpus.load(TRAINER, WEIGHTS_ONLY)
    gpus.load(TRAINER, WEIGHTS_ONLY)
    assert stage.model_calls() == [(TRAINER, WEIGHTS_ONLY)]
    gpus.load(CRITIC, ALL)
    assert stage.model_calls() == [(TRAINER, ()), (CRITIC, ALL)]
    gpus.load(TRAINER, ALL)
    assert stage.model_calls() == [(CRITIC, ()), (TRAINER, ALL)]
    stage.loop.run(gpus.for_sync())
    assert stage.model_calls() == [(TRAINER, WEIGHTS_ONLY)]
    gpus.prepare_rollout()
    assert stage.model_calls() == [], "the engines have GPUs of their own"


def test_a_step_on_shared_gpus(stage: Stage) -> None:
    gpus = SharedGpus(stage.memory(), stage.loop.run)
    gpus.add(TRAINER, Ranks(TRAINER, stage.log))
    stage.model_calls()
    gpus.load(TRAINER, ALL)
    assert stage.engine_calls() == [(RELEASE, sorted([KV_CACHE, WEIGHTS]))]
    assert stage.model_calls() == [(TRAINER, ALL)]
    stage.loop.run(gpus.for_sync())
    assert stage.engine_calls() == [(RESUME, [WEIGHTS])]
    assert stage.model_calls() == [(TRAINER, WEIGHTS_ONLY)]
    gpus.prepare_rollout()
    assert stage.engine_calls() == [(RESUME, [KV_CACHE])]
    assert stage.model_calls() == [(TRAINER, ())]
    gpus.load(TRAINER, ALL)
    stage.engine_calls()
    stage.model_calls()
    gpus.offload_models()
    assert stage.model_calls() == [(TRAINER, ())]
    assert stage.engine_calls() == [], "a save takes no GPU memory"


def test_a_colocated_judge_is_loaded_while_it_scores_also_if_that_fails(stage: Stage) -> None:
    judge = FakeSGLang(stage.loop)
    gpus = SharedGpus(stage.memory(), stage.loop.run)
    gpus.add_colocated("judge", EngineMemory([judge.url], 5.0))
    all_of_it = sorted([KV_CACHE, WEIGHTS])
    judge_calls = Stage(stage.loop, judge).engine_calls
    assert judge_calls() == [(RELEASE, all_of_it)]

    def score(samples: object) -> list[float]:
        assert judge_calls() == [(RESUME, all_of_it)]
        assert stage.engine_calls() == [(RELEASE, [KV_CACHE])]
        raise ValueError("no score")

    with pytest.raises(ValueError, match="no score"):
        SharingScorer(score, ("judge",), gpus)([])
    assert judge_calls() == [(RELEASE, all_of_it)]
    assert SharingScorer(lambda samples: [1.0], ("teacher",), gpus)([]) == [1.0]
    assert judge_calls() == [], "the teacher is not colocated"


def test_without_shared_gpus_nothing_is_asked(stage: Stage) -> None:
    gpus = SharedGpus(EngineMemory((), 5.0), stage.loop.run)
    gpus.load(TRAINER, ALL)
    gpus.prepare_rollout()
    stage.loop.run(gpus.for_sync())
    gpus.offload_models()
    with gpus.hold_loaded(("judge",)):
        pass
    assert stage.engine.calls == []
