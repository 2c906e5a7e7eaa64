"""Shared GPUs: what engines and models are asked to load and offload in each phase, in order."""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.run.roles import colocation
from mcore_rl.run.roles.colocation import (
    ALL,
    CRITIC,
    TRAINER,
    WEIGHTS_ONLY,
    EngineMemory,
    SharedGpus,
    SharingScorer,
)
from mcore_rl.weight_sync.controller.engine_control import (
    GRAPHS,
    KV_CACHE,
    WEIGHTS,
    EngineCallError,
)
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


@dataclass
class Returning:
    """Engines, as LostEngines: one may be lost, and a server then starts in its place."""

    loop: EventLoop
    living: list[FakeSGLang]
    log: list[tuple[str, Any]]
    num_lost: int = 0
    num_unseen: int = 0
    """Lost engines that the next look finds."""

    def list_living(self) -> list[str]:
        return [engine.url for engine in self.living]

    async def look(self) -> None:
        for _ in range(self.num_unseen):
            self.living.pop()
        self.num_lost += self.num_unseen
        self.num_unseen = 0

    async def seat_lost(self) -> bool:
        return self.num_lost > 0

    async def start_lost(self) -> list[str]:
        self.log.append(("engine", "starts"))
        started = await asyncio.to_thread(FakeSGLang, self.loop)
        self.living.append(started)
        self.num_lost -= 1
        return [started.url]


def test_a_lost_engine_starts_on_empty_gpus_before_the_next_sync(stage: Stage) -> None:
    """It dies between its last request and the call that it release its memory."""
    other = FakeSGLang(stage.loop)
    returning = Returning(stage.loop, [stage.engine, other], stage.log)
    urls = returning.list_living()
    gpus = SharedGpus(EngineMemory(urls, 5.0, engines=returning), stage.loop.run)
    gpus.add(TRAINER, Ranks(TRAINER, stage.log))
    stage.model_calls()
    other.stop()
    returning.num_unseen = 1
    gpus.load(TRAINER, ALL)
    assert stage.engine_calls() == [(RELEASE, sorted([KV_CACHE, WEIGHTS]))]
    assert gpus.lacks_engine_weights
    stage.loop.run(gpus.for_sync())
    assert stage.model_calls() == [
        *((TRAINER, ALL), (TRAINER, ())),
        *(("engine", "starts"), (TRAINER, WEIGHTS_ONLY)),
    ]
    new = Stage(stage.loop, returning.living[1])
    taken = [(RELEASE, sorted([KV_CACHE, WEIGHTS])), (RESUME, [WEIGHTS])]
    assert (new.engine_calls(), stage.engine_calls()) == (taken, taken[1:])
    assert not gpus.lacks_engine_weights
    stage.loop.run(gpus.for_sync())
    gpus.prepare_rollout()
    assert new.engine_calls() == stage.engine_calls() == [(RESUME, [KV_CACHE])]


def test_a_lost_engine_starts_while_samples_are_waited_for(stage: Stage) -> None:
    """The other one gives up its KV cache, as the trainer's weights are loaded for the sync."""
    returning = Returning(stage.loop, [stage.engine], stage.log, num_lost=1)
    gpus = SharedGpus(EngineMemory(["", ""], 5.0, engines=returning), stage.loop.run)
    stage.loop.run(gpus.for_sync())
    new = Stage(stage.loop, returning.living[1])
    released = [(RELEASE, [KV_CACHE])]
    assert (new.engine_calls(), stage.engine_calls()) == (released, released)
    stage.loop.run(gpus.for_rollout())
    assert new.engine_calls() == stage.engine_calls() == [(RESUME, [KV_CACHE])]


def test_the_failure_of_an_engine_that_is_not_lost_is_raised(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocation, "LOSS_SHOWS_S", 0.0)
    stage.engine.answer = lambda body: (500, "out of memory")
    returning = Returning(stage.loop, [stage.engine], stage.log)
    for engines in (None, returning):
        memory = EngineMemory([stage.engine.url], 5.0, engines=engines)
        with pytest.raises(EngineCallError, match="out of memory"):
            stage.loop.run(memory.for_training())


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
