"""Requests to a served model: spread, retried while that may help, and answered in order."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mcore_rl.config import ServedModelConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout import served_models as served_client
from mcore_rl.rollout.engine_health import EngineHealth, EngineState
from mcore_rl.rollout.served_models import ServedClient, ServedEndpoint, ServedRequestError
from tests.support.fake_sglang import FakeSGLang, Route, loop_with_quick_retries

PATH = "/v1/chat/completions"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, served_client) as loop:
        yield loop


def endpoint(*engines: FakeSGLang, timeout_s: float = 5.0) -> ServedEndpoint:
    addresses = tuple(engine.address for engine in engines)
    health = EngineHealth([address.url for address in addresses])
    return ServedEndpoint(
        "judge", ServedModelConfig(request_timeout_s=timeout_s), addresses, health, "words"
    )


def post(loop: EventLoop, to: ServedEndpoint, *bodies: Mapping[str, Any]) -> list[Any]:
    return loop.run(ServedClient(to).post_all(PATH, bodies))


def test_answers_come_in_the_order_of_the_bodies_and_name_the_model(loop: EventLoop) -> None:
    engines = [FakeSGLang(loop), FakeSGLang(loop)]
    for engine in engines:
        engine.answer = lambda body: (200, {"text": body["i"], "model": body["model"]})
    bodies = [{"i": i} for i in range(20)]
    answers = post(loop, endpoint(*engines), *bodies)
    assert answers == [{"text": i, "model": "words"} for i in range(20)]
    assert [len(engine.calls) for engine in engines] == [10, 10]


def test_busy_and_broken_engines_are_asked_again(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    failures = [(429, "busy"), (500, "broken")]

    def answer(body: Mapping[str, Any]) -> Route:
        return failures.pop(0) if failures else (200, {"text": "fine"})

    engine.answer = answer
    assert post(loop, endpoint(engine), {}) == [{"text": "fine"}]
    assert len(engine.calls) == 3


def test_an_outage_that_all_requests_meet_is_one_line_of_the_log(
    loop: EventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeSGLang(loop)
    fine = {"text": "fine"}
    engine.answer = lambda body: (503, "down") if len(engine.calls) <= 100 else (200, fine)
    caplog.set_level("INFO", "mcore_rl")
    answers = post(loop, endpoint(engine, timeout_s=60.0), *({"i": i} for i in range(50)))
    assert answers == [fine] * 50
    assert len(engine.calls) == 150
    [record] = [record for record in caplog.records if record.name.endswith("served_models")]
    assert record.getMessage().startswith("judge: a request failed with ")
    assert record.getMessage().endswith("HTTP 503: down; trying again")


@pytest.mark.parametrize(
    ("route", "message"), [((400, "too long"), "HTTP 400: too long"), ((200, "?"), r"no JSON .*\?")]
)
def test_what_no_retry_helps_is_an_answer_of_its_own(
    loop: EventLoop, route: Route, message: str
) -> None:
    engine = FakeSGLang(loop)
    engine.answer = lambda body: route if body.get("bad") else (200, {"text": "fine"})
    good, bad = post(loop, endpoint(engine), {}, {"bad": True})
    assert good == {"text": "fine"}
    assert isinstance(bad, ServedRequestError)
    with pytest.raises(ServedRequestError, match=rf"judge, engine {engine.url} .*: {message}"):
        raise bad


def test_while_no_engine_serves_a_request_waits_until_its_time_is_up(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    to = endpoint(engine, timeout_s=0.2)
    to.health.note([EngineState(engine.url, restarts=1, healthy=False)])
    (error,) = post(loop, to, {})
    assert isinstance(error, ServedRequestError)
    assert "judge.request_timeout_s=0.2 is over; last: _TransientError: no engine serves" in str(
        error
    )
    assert engine.calls == []
