"""How RolloutClient spreads requests and retries them, against engines without a model."""

from collections.abc import Iterator

import pytest

from mcore_rl.config import RolloutConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout import client as client_module
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions, RolloutError
from mcore_rl.types import Prompt, Sample
from tests.support.fake_sglang import FakeSGLang, loop_with_quick_retries, sampled_answer

CONFIG = RolloutConfig(retries=1, request_timeout_s=5.0)
SAMPLING = Sampling(max_response_len=2)
PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", "") for i in range(6)]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, client_module) as loop:
        yield loop


@pytest.fixture
def engines(loop: EventLoop) -> list[FakeSGLang]:
    return [FakeSGLang(loop), FakeSGLang(loop)]


def make_client(engines: list[FakeSGLang], health: EngineHealth | None = None) -> RolloutClient:
    transport = HttpOptions.make(CONFIG, [9], str).open
    return RolloutClient([e.address for e in engines], CONFIG, transport, health)


def generate(loop: EventLoop, client: RolloutClient, num_samples: int = 1) -> list[Sample]:
    return loop.run(client.generate(PROMPTS, num_samples, SAMPLING))


def test_requests_of_a_prompt_stay_together_and_engines_are_loaded_evenly(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    samples = generate(loop, make_client(engines), num_samples=4)
    assert [(s.prompt.index, s.sample_index) for s in samples] == [
        (i, k) for i in range(6) for k in range(4)
    ]
    prompts = [[tuple(body["input_ids"]) for body in engine.sampled] for engine in engines]
    assert len(prompts[0]) == len(prompts[1]) == 12
    assert not set(prompts[0]) & set(prompts[1])


def test_engines_out_of_rotation_get_nothing(loop: EventLoop, engines: list[FakeSGLang]) -> None:
    out, serving = engines
    health = EngineHealth([out.url, serving.url])
    client = make_client(engines, health)
    health.set_serving([serving.url], {out.url: "weights are mixed"})
    assert len(generate(loop, client)) == 6
    assert out.sampled == []
    health.set_serving([], {serving.url: "weights are old"})
    with pytest.raises(
        RolloutError, match=r"no engine in rotation .*weights are mixed.*weights are old"
    ):
        generate(loop, client)
    health.set_serving([serving.url], {})
    assert len(generate(loop, client)) == 6


def test_a_failed_request_goes_to_the_other_engine(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    broken, working = engines
    broken.answer = lambda body: (500, "broken")
    assert len(generate(loop, make_client(engines))) == 6
    assert len(working.sampled) == 6 and broken.sampled


def test_an_aborted_request_is_a_failure_unless_the_session_aborted_it(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    reason = {"type": "abort", "message": "out of memory"}
    engine.answer = lambda body: (200, sampled_answer(body, 0, finish_reason=reason))
    with pytest.raises(
        RolloutError, match=r"failed 2 times, last with the engine aborted it: .*out of memory"
    ):
        generate(loop, make_client([engine]))


def test_a_refused_request_is_not_retried(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    engine.answer = lambda body: (400, "too long")
    with pytest.raises(RolloutError, match="refused a request with HTTP 400: too long"):
        loop.run(make_client([engine]).generate(PROMPTS[:1], 1, SAMPLING))
    assert len(engine.sampled) == 1
