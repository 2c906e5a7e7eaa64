"""Prompts in, samples out, through the loss of engines."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest

from mcore_rl.cluster.answers import RankLostError
from mcore_rl.config import EvalConfig, RolloutConfig
from mcore_rl.process.clock import replace_clock
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions, RolloutError
from mcore_rl.run.roles.generator import (
    EngineGenerator,
    count_drawn,
    make_sampling,
    rollout_of_evaluations,
)
from mcore_rl.types import Prompt
from tests.support.collector_scene import SAMPLING, CollectorScene
from tests.support.fake_sglang import FakeSGLang
from tests.support.storing_client import StoringClient

T = TypeVar("T")
CONFIG = RolloutConfig(
    max_response_len=3, temperature=0.7, top_p=0.9, top_k=5, retries=0, deterministic=True
)
PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", "") for i in range(3)]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def make_generator(loop: EventLoop, engine: FakeSGLang, **options: object) -> EngineGenerator:
    client = RolloutClient([engine.address], CONFIG, HttpOptions.make(CONFIG, [9], str).open)
    return EngineGenerator(StoringClient(client), CONFIG, loop.run, **options)  # type: ignore[arg-type]


def test_sampling_is_the_recipes_or_greedy() -> None:
    assert make_sampling(CONFIG, greedy=False, seed=4) == Sampling(
        3, temperature=0.7, top_p=0.9, top_k=5, seed=4, routed_experts=True, indexer_topk=True
    )
    assert make_sampling(CONFIG, greedy=True, seed=4) == Sampling(3, temperature=0.0, seed=4)


def test_an_evaluation_is_sampled_by_its_own_options(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    assert rollout_of_evaluations(CONFIG, EvalConfig()) == CONFIG
    options = EvalConfig(samples=2, temperature=0.25, top_p=0.5, max_response_len=2)
    own = rollout_of_evaluations(CONFIG, options)
    generator = make_generator(loop, engine, evaluation=own)
    for for_eval in (False, True):
        for greedy in (False, True):
            generator.generate(PROMPTS[:1], 1, greedy=greedy, seed=0, for_eval=for_eval)
    names = ("temperature", "top_p", "max_new_tokens")
    assert [tuple(body["sampling_params"][n] for n in names) for body in engine.sampled] == [
        *((0.7, 0.9, 3), (0.0, 1.0, 3)),
        *((0.25, 0.5, 2), (0.0, 1.0, 2)),
    ]


def test_what_was_drawn_is_counted_from_now_on(loop: EventLoop) -> None:
    scene = CollectorScene(loop)
    scene.run(scene.pool.generate(PROMPTS, 2, SAMPLING))
    of_a_step = count_drawn(scene.pool, 8)
    beside_training = count_drawn(scene.pool)
    assert of_a_step() == "0 of 8 samples, 0 tokens of whole groups"
    scene.run(scene.pool.generate(PROMPTS[:2], 2, SAMPLING))
    assert of_a_step() == "4 of 8 samples, 12 tokens of whole groups"
    assert beside_training() == "4 samples, 12 tokens of whole groups"


def test_samples_come_in_the_order_of_the_prompts(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    samples = make_generator(loop, engine).generate(PROMPTS, 2, greedy=False, seed=0)
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (i, k) for i in range(3) for k in range(2)
    ]
    seeds = {body["sampling_params"]["sampling_seed"] for body in engine.sampled}
    assert len(seeds) == 6


def test_all_prompts_are_sampled_again_once_an_engine_is_back(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    engine.answer = lambda body: (503, "down")
    revived: list[bool] = []

    async def revive() -> bool:
        engine.answer = lambda body: None
        revived.append(True)
        return True

    generator = make_generator(loop, engine, revive=revive)
    assert len(generator.generate(PROMPTS, 1, greedy=False, seed=0)) == 3
    assert revived == [True]


def test_a_failure_is_raised_if_no_engine_comes_back(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    engine.answer = lambda body: (503, "down")

    async def revive() -> bool:
        return False

    for options in ({}, {"revive": revive}):
        with pytest.raises(RolloutError, match="HTTP 503: down"):
            make_generator(loop, engine, **options).generate(PROMPTS, 1, greedy=False, seed=0)


class RecoversOnce:
    """A Recovery that does work again once, after its first error."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def repeat(self, work: Callable[[], T], /) -> T:
        try:
            return work()
        except RuntimeError as error:
            self.errors.append(error)
            return work()


def test_prompts_are_sampled_again_after_ranks_were_recovered_that_an_engine_needs(
    loop: EventLoop,
) -> None:
    engine = FakeSGLang(loop)
    engine.answer = lambda body: (503, "down")
    recovery, prepared = RecoversOnce(), list[int]()

    async def revive() -> bool:
        raise RankLostError("trainer rank 0 died")

    async def prepare() -> None:
        prepared.append(len(recovery.errors))
        if recovery.errors:
            engine.answer = lambda body: None

    options = {"revive": revive, "recovery": recovery, "prepare": prepare}
    generator = make_generator(loop, engine, **options)
    assert len(generator.generate(PROMPTS, 1, greedy=False, seed=0)) == 3
    assert list(map(str, recovery.errors)) == ["trainer rank 0 died"] and prepared == [0, 1]


class Clock:
    """Stands still but when it is told to go on."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def answer_after(self, engine: FakeSGLang, seconds: float) -> None:
        """Let so many seconds pass while the engine answers a request for a sample."""

        def answer(body: object) -> None:
            self.at_s += seconds

        engine.answer = answer


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with replace_clock(lambda: clock.at_s):
        yield clock


def test_the_idle_share_is_of_the_time_since_the_last_call(loop: EventLoop, clock: Clock) -> None:
    """The engine is idle for 10 s; then for another one, before it takes 3 s for 12 samples."""
    engine = FakeSGLang(loop)
    generator = make_generator(loop, engine)
    clock.at_s += 10.0
    assert generator.measure_engines() == {"idle/engines": 1.0}
    clock.at_s += 1.0
    clock.answer_after(engine, 0.25)
    generator.generate(PROMPTS, 4, greedy=False, seed=0)
    assert generator.measure_engines() == {"idle/engines": 0.25}, "it has no others to lag behind"


def test_the_engine_that_takes_longest_for_a_token_is_named(loop: EventLoop, clock: Clock) -> None:
    """Engine 1 takes a second for a sample, engine 2 takes 6 s; they serve one after the other."""
    engines = [FakeSGLang(loop), FakeSGLang(loop)]
    addresses = [replace(engine.address, number=1 + k) for k, engine in enumerate(engines)]
    health = EngineHealth([engine.url for engine in engines])
    transport = HttpOptions.make(CONFIG, [9], str).open
    client = StoringClient(RolloutClient(addresses, CONFIG, transport, health))
    generator = EngineGenerator(client, CONFIG, loop.run)
    for engine, seconds in zip(engines, (1.0, 6.0), strict=True):
        health.set_serving([engine.url], {})
        clock.answer_after(engine, seconds)
        generator.generate(PROMPTS[:1], 1, greedy=False, seed=0)
    measured = generator.measure_engines()
    assert measured == {"idle/engines": 0.5, "engines/lag": 6.0, "engines/slowest": 2.0}
    clock.at_s += 1.0
    assert "engines/lag" not in generator.measure_engines(), "since the last call"


def test_a_client_without_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        RolloutClient([], CONFIG, HttpOptions.make(CONFIG, [9], str).open)
