"""A session posts requests while it may, and while engines have room in their KV caches."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from mcore_rl.config import RolloutConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout import client as client_module
from mcore_rl.rollout.client import RolloutClient, RolloutSession
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Prompt, Sample
from tests.support.fake_sglang import FakeSGLang, loop_with_quick_retries

DEADLINE_S = 60.0
SAMPLING = Sampling(max_response_len=2)
PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", "") for i in range(4)]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, client_module) as loop:
        yield loop


def make_client(engine: FakeSGLang, **options: float) -> RolloutClient:
    config = RolloutConfig(retries=1, request_timeout_s=DEADLINE_S, **options)  # type: ignore[arg-type]
    return RolloutClient([engine.address], config, HttpOptions.make(config, [9], str).open)


async def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


async def wait_for_free_kv(session: RolloutSession, engine: FakeSGLang) -> None:
    """Wait until the session knows what an engine tells of its KV cache; one may tell nothing."""
    assert session._admission is not None
    known = session._admission._monitor._free
    await wait_until(lambda: engine.url in known)


async def begin(
    session: RolloutSession, engine: FakeSGLang, num_posted: int
) -> "asyncio.Task[list[Sample]]":
    """Have the prompts sampled; exactly `num_posted` of the requests reach the engine."""
    work = asyncio.create_task(session.generate(PROMPTS, 1, SAMPLING))
    await wait_until(
        lambda: len(engine.sampled) >= num_posted and len(engine.sampled) + session.num_waiting == 4
    )
    await asyncio.sleep(0.2)
    assert (len(engine.sampled), session.num_waiting) == (num_posted, 4 - num_posted)
    return work


@pytest.mark.parametrize(("free_kv", "num_posted"), [(24, 1), (26, 4), (None, 4)])
def test_requests_wait_while_the_engine_has_too_little_room(
    loop: EventLoop, free_kv: int | None, num_posted: int
) -> None:
    """An engine without room has one request under way; one that tells nothing gets all."""
    engine = FakeSGLang(loop)
    engine.num_free = 0
    engine.free_kv = free_kv
    client = make_client(engine, min_free_kv=0.25)

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), client.open() as session:
            await wait_for_free_kv(session, engine)
            work = await begin(session, engine, num_posted)
            engine.free_kv = 100
            await wait_until(lambda: len(engine.sampled) == 4)
            await engine.let_go()
            assert len(await work) == 4
            assert session.num_waiting == 0

    loop.run(run())


def test_nothing_is_posted_while_the_session_is_held_also_with_room(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    engine.free_kv = 100
    client = make_client(engine, min_free_kv=0.25)

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), client.open() as session:
            await session.hold(cut_off=False)
            work = await begin(session, engine, 0)
            await session.resume()
            assert len(await work) == 4

    loop.run(run())


def test_requests_that_give_up_leave_the_queue(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    engine.num_free = 0
    engine.free_kv = 0
    client = make_client(engine, min_free_kv=0.25)

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), client.open() as session:
            await wait_for_free_kv(session, engine)
            work = await begin(session, engine, 1)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert session.num_waiting == 0
            engine.free_kv = 100
            await engine.let_go()
            assert len(await session.generate(PROMPTS, 2, SAMPLING)) == 8

    loop.run(run())
