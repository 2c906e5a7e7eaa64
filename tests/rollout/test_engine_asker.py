"""Any engine that serves is asked; one that is gone is passed over, a refusal is told."""

import asyncio
from collections.abc import Iterator

import pytest

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.http import open_session
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.transport import EngineAsker, RolloutError
from tests.support.fake_sglang import FakeSGLang


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def engines(loop: EventLoop) -> Iterator[list[FakeSGLang]]:
    engines = [FakeSGLang(loop), FakeSGLang(loop)]
    yield engines
    for engine in engines:
        engine.stop()


def ask(loop: EventLoop, engines: list[FakeSGLang], times: int, out: str = "") -> list[object]:
    health = EngineHealth([engine.url for engine in engines])
    health.set_serving([e.url for e in engines if e.url != out], {out: "it is gone"} if out else {})

    async def run() -> list[object]:
        async with open_session(5.0) as http:
            asker = EngineAsker(http, [engine.address for engine in engines], health)
            asked = (asker("/parse_function_call", {"text": "x"}) for _ in range(times))
            return list(await asyncio.gather(*asked))

    return loop.run(run())


def test_engines_take_turns(loop: EventLoop, engines: list[FakeSGLang]) -> None:
    assert ask(loop, engines, 6) == [{"success": True}] * 6
    assert [len(engine.calls) for engine in engines] == [3, 3]
    assert engines[0].calls[0] == ("/parse_function_call", {"text": "x"})
    ask(loop, engines, 2, out=engines[0].url)
    assert [len(engine.calls) for engine in engines] == [3, 5]


def test_an_engine_that_is_gone_is_passed_over(loop: EventLoop, engines: list[FakeSGLang]) -> None:
    engines[0].stop()
    assert ask(loop, engines, 3) == [{"success": True}] * 3
    engines[1].stop()
    with pytest.raises(RolloutError, match=r"no engine answers /parse_function_call: .*Connect"):
        ask(loop, engines, 1)


def test_a_refusal_is_told(loop: EventLoop, engines: list[FakeSGLang]) -> None:
    for engine in engines:
        engine.answer = lambda body: (500, "no such parser")
    with pytest.raises(ValueError, match="HTTP 500: no such parser"):
        ask(loop, engines, 1)
