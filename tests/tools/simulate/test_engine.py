"""The engine as a fluid, against one that decodes token by token."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mcore_rl.rollout.transport import AbortedError, TransientError
from mcore_rl.tools.simulate.engine import SimulatedEngine
from mcore_rl.tools.simulate.kv_cache import EndedEarlyError, EngineSpeed
from mcore_rl.tools.simulate.virtual_time import Machine, VirtualLoop, WorkClock
from mcore_rl.types import VersionSpan, WeightVersion

SPEED = EngineSpeed(
    fixed_s=[0.0, *(0.01 + 0.0005 * num for num in range(1, 17))],
    per_context_s=1e-6,
    prefill_s=lambda num_tokens: num_tokens * 1e-4,
    kv_capacity=100_000,
)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def engine_of(loop: VirtualLoop, speed: EngineSpeed = SPEED) -> SimulatedEngine:
    return SimulatedEngine(loop, "http://e", speed, WeightVersion(0))


def test_one_request_takes_its_prefill_and_the_sum_of_its_steps(loop: VirtualLoop) -> None:
    loop.run_until_complete(engine_of(loop).sample(1, 100, 200, 200))
    steps = sum(SPEED.fixed_s[1] + 1e-6 * (100 + t + 0.5) for t in range(200))
    assert loop.time() == pytest.approx(100 * 1e-4 + steps, rel=1e-9)


def test_it_tells_the_free_share_of_its_cache_with_what_waits_as_taken(loop: VirtualLoop) -> None:
    engine = engine_of(loop, replace(SPEED, kv_capacity=1000, fixed_s=[0.0, 0.01]))

    async def ask() -> None:
        assert engine.free_kv == 1.0
        running = asyncio.ensure_future(engine.sample(1, 100, 400, 400))
        await asyncio.sleep(0.5)
        alone = engine.free_kv
        assert 0.5 < alone < 0.9  # its prompt, and what it has drawn
        waiting = asyncio.ensure_future(engine.sample(2, 200, 400, 400))
        await asyncio.sleep(1e-6)
        assert engine.free_kv == pytest.approx(alone - 0.2 - (1 - alone), abs=1e-3)
        await asyncio.gather(running, waiting)
        assert engine.free_kv == pytest.approx(1.0)

    loop.run_until_complete(ask())


@pytest.mark.parametrize("seed", range(5))
def test_many_requests_end_when_they_do_token_by_token(loop: VirtualLoop, seed: int) -> None:
    draw = random.Random(seed)
    requests = [(draw.uniform(0, 3), draw.randint(5, 300)) for _ in range(60)]
    engine = engine_of(loop)
    ends = [0.0] * len(requests)

    async def ask(i: int) -> None:
        arrives_s, num_tokens = requests[i]
        await asyncio.sleep(arrives_s)
        await engine.sample(i, 50, num_tokens, 300)
        ends[i] = loop.time()

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, range(len(requests))))

    loop.run_until_complete(ask_all())
    expected = token_by_token(requests)
    # A request may begin one step earlier here, which has no steps to wait for.
    for end, wanted in zip(ends, expected, strict=True):
        assert end == pytest.approx(wanted, rel=0.03)
    assert engine.num_tokens == pytest.approx(sum(num for _, num in requests), abs=1)


def token_by_token(requests: list[tuple[float, int]]) -> list[float]:
    """When each request ends in an engine that takes one decode step after the other."""
    now_s = 0.0
    waiting = sorted((arrives_s, i) for i, (arrives_s, _) in enumerate(requests))
    running: dict[int, int] = {}
    ends = [0.0] * len(requests)
    while waiting or running:
        if not running and waiting[0][0] > now_s:
            now_s = waiting[0][0]
        while waiting and waiting[0][0] <= now_s and len(running) < SPEED.max_running:
            _, i = waiting.pop(0)
            now_s += SPEED.prefill_s(50)
            running[i] = 0
        context = sum(50 + generated for generated in running.values())
        now_s += SPEED.fixed_s[len(running)] + SPEED.per_context_s * context
        for i in list(running):
            running[i] += 1
            if running[i] == requests[i][1]:
                ends[i] = now_s
                del running[i]
    return ends


def test_prefill_and_decode_slow_down_while_a_rank_works_on_the_same_core(
    loop: VirtualLoop,
) -> None:
    machine = Machine(1)
    ranks = WorkClock(loop, {machine: [1.0]})
    clock = WorkClock(loop, {machine: [1.0]})
    even = replace(SPEED, fixed_s=[0.0, 0.01], per_context_s=0.0)
    alone = SimulatedEngine(loop, "http://f", even, WeightVersion(0))
    shared = SimulatedEngine(loop, "http://g", even, WeightVersion(0), clock)

    async def run() -> list[float]:
        began_s = loop.time()
        await alone.sample(1, 1000, 90, 90)
        seconds = [loop.time() - began_s]
        # The first half of a second of work has the core to itself.
        loop.call_later(0.5, lambda: loop.create_task(ranks.work(100)))
        began_s = loop.time()
        await shared.sample(1, 1000, 90, 90)
        return [*seconds, loop.time() - began_s, shared.busy_s]

    assert loop.run_until_complete(run()) == pytest.approx([1.0, 1.5, 1.5])


def test_a_score_waits_for_a_step_and_stops_all_responses(loop: VirtualLoop) -> None:
    speed = replace(SPEED, fixed_s=[0.0, 0.01], per_context_s=0.0)
    engine = engine_of(loop, speed)

    async def run() -> list[float]:
        await engine.score(2.0)
        ends = [loop.time()]
        asking = asyncio.create_task(engine.sample(1, 0, 100, 100))
        await asyncio.sleep(0.505)
        await engine.score(3.0)
        ends.append(loop.time())
        await asking
        return [*ends, loop.time()]

    assert loop.run_until_complete(run()) == pytest.approx([2.0, 2.505 + 0.01 + 3, 2 + 1 + 3])


def test_samples_of_a_prompt_share_its_prefill(loop: VirtualLoop) -> None:
    speed = replace(SPEED, prefill_s=lambda num_tokens: num_tokens * 1.0)
    engine = engine_of(loop, speed)

    async def ask(prompts: list[int]) -> float:
        began_s = loop.time()
        await asyncio.gather(*(engine.sample(p, 100, 10, 10) for p in prompts))
        return loop.time() - began_s

    assert 100 < loop.run_until_complete(ask([1, 1, 1, 1])) < 101
    assert loop.run_until_complete(ask([1])) < 1, "the prompt is still cached"
    assert 200 < loop.run_until_complete(ask([2, 3])) < 201
    engine.pause()
    engine.resume(WeightVersion(1))
    assert loop.run_until_complete(ask([1])) > 100, "other weights make another cache"


def test_a_full_cache_sends_requests_back_and_all_end(loop: VirtualLoop) -> None:
    engine = engine_of(loop, replace(SPEED, kv_capacity=1500))

    async def ask_all() -> list[tuple[VersionSpan, ...]]:
        return await asyncio.gather(*(engine.sample(i, 20, 300, 300) for i in range(16)))

    answers = loop.run_until_complete(ask_all())
    assert engine.num_retracted > 0
    assert answers == [(VersionSpan(0, 300, WeightVersion(0)),)] * 16
    assert engine.num_tokens == pytest.approx(16 * 300, abs=1), "no token is sampled twice"


def test_responses_that_outlive_a_sync_name_both_versions(loop: VirtualLoop) -> None:
    engine = engine_of(loop)

    async def ask() -> tuple[VersionSpan, ...]:
        asking = asyncio.create_task(engine.sample(1, 10, 100, 100))
        await asyncio.sleep(0.5)
        engine.pause()
        await asyncio.sleep(1000)
        engine.resume(WeightVersion(1))
        return await asking

    first, second = loop.run_until_complete(ask())
    assert (first.version, second.version) == (0, 1)
    assert (first.start, first.stop, second.stop) == (0, second.start, 100)
    assert 40 < first.stop < 50, "half a second of steps"
    assert 1000 < loop.time() < 1002


def test_lost_and_aborted_requests_say_so(loop: VirtualLoop) -> None:
    engine = engine_of(loop)

    async def ask_and(end: str) -> None:
        asking = asyncio.create_task(engine.sample(1, 10, 100, 100))
        await asyncio.sleep(0.1)
        getattr(engine, end)()
        await asking

    with pytest.raises(AbortedError):
        loop.run_until_complete(ask_and("abort_all"))
    with pytest.raises(TransientError, match="connection lost"):
        loop.run_until_complete(ask_and("fail"))
    with pytest.raises(TransientError, match="refused"):
        loop.run_until_complete(engine.sample(1, 10, 5, 5))
    engine.restart()
    assert loop.run_until_complete(engine.sample(1, 10, 5, 5))


def test_a_client_that_leaves_frees_its_place(loop: VirtualLoop) -> None:
    engine = engine_of(loop, replace(SPEED, fixed_s=SPEED.fixed_s[:2]))

    async def ask() -> None:
        leaving = asyncio.create_task(engine.sample(1, 10, 10_000, 10_000))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(engine.sample(2, 10, 10, 10))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await waiting

    loop.run_until_complete(ask())
    assert loop.time() < 1


def test_a_request_that_ends_early_goes_on_elsewhere_with_what_it_has(loop: VirtualLoop) -> None:
    first, second = engine_of(loop), engine_of(loop)
    second.version = WeightVersion(3)

    async def move() -> tuple[tuple[VersionSpan, ...], tuple[VersionSpan, ...]]:
        task = asyncio.ensure_future(first.sample(1, 100, 200, 200, rid="a"))
        other = asyncio.ensure_future(first.sample(2, 100, 200, 200, rid="b"))
        await asyncio.sleep(1.0)
        first.abort("nobody")
        first.abort("a")
        with pytest.raises(EndedEarlyError) as ended:
            await task
        begun = ended.value.versions
        rest = await second.sample(1, 100, 200, 200, "c", begun[-1].stop)
        await other
        return begun, rest

    begun, rest = loop.run_until_complete(move())
    num_begun = begun[-1].stop
    assert 50 < num_begun < 150
    assert rest == (VersionSpan(num_begun, 200, WeightVersion(3)),)
    assert first.num_tokens + second.num_tokens == pytest.approx(400, abs=2)
