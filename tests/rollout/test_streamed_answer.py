"""Answers that come in parts: what came of one that ends too early is kept."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config import RolloutConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout import client as client_module
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import EngineAffinity, Request, RoutedExpertsShape, Sampling
from mcore_rl.rollout.streamed_answer import StreamedAnswer
from mcore_rl.rollout.transport import HttpOptions, RolloutError, TransientError
from mcore_rl.types import Prompt, Sample, WeightVersion
from tests.support.fake_sglang import (
    FakeSGLang,
    cut_answer,
    loop_with_quick_retries,
    sampled_answer,
)

PROMPT = Prompt(3, (5, 6), (), "unit", "")
REQUEST = Request(PROMPT, 1, EngineAffinity(2))
ROLLOUT = RolloutConfig(stream_every=256, engines=2)
LONG = Sampling(600)
BODY = {"sampling_params": {"max_new_tokens": 600}}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, client_module) as loop:
        yield loop


@pytest.fixture
def engines(loop: EventLoop) -> Iterator[list[FakeSGLang]]:
    engines = [FakeSGLang(loop, version=7), FakeSGLang(loop, version=7)]
    yield engines
    for engine in engines:
        engine.stop()


def ask(
    loop: EventLoop,
    engine: FakeSGLang,
    sampling: Sampling = LONG,
    request: Request = REQUEST,
    shape: RoutedExpertsShape | None = None,
    **rollout: Any,
) -> Sample:
    async def sample() -> Sample:
        options = HttpOptions.make(replace(ROLLOUT, **rollout), [9], str, shape)
        async with options.open() as transport:
            return await transport.sample(engine.address, request, sampling)

    return loop.run(sample())


def make_client(engines: list[FakeSGLang]) -> RolloutClient:
    """Return a client that asks the first engine first, after a sync of version 7."""
    urls = [engine.url for engine in engines]
    health = EngineHealth(urls)
    health.set_serving(urls, {}, WeightVersion(7))
    addresses = [replace(e.address, number=number) for number, e in enumerate(engines)]
    return RolloutClient(addresses, ROLLOUT, HttpOptions.make(ROLLOUT, [9], str).open, health)


def draw(loop: EventLoop, engines: list[FakeSGLang], versions: tuple[int, int] = (7, 7)) -> Sample:
    for engine, version in zip(engines, versions, strict=True):
        engine.version = version
    [sample] = loop.run(make_client(engines).generate([PROMPT], 1, LONG))
    return sample


def test_an_answer_in_parts_is_the_one_that_comes_whole(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    in_parts, whole = ask(loop, engines[0]), ask(loop, engines[0], stream_every=0)
    assert in_parts == whole and in_parts.response_len == 600
    asked, plain = engines[0].sampled
    assert asked["stream"] and asked["sampling_params"]["stream_interval"] == 256
    assert "stream" not in plain


@pytest.mark.parametrize(
    ("request_", "sampling", "rollout"),
    [
        (REQUEST, Sampling(256), {}),
        (replace(REQUEST, stop=("\n",)), LONG, {}),
        (REQUEST, LONG, {"speculate": "ngram"}),
    ],
    ids=["short", "stop", "drafts"],
)
def test_what_could_not_go_on_elsewhere_comes_whole(
    loop: EventLoop,
    engines: list[FakeSGLang],
    request_: Request,
    sampling: Sampling,
    rollout: dict[str, Any],
) -> None:
    ask(loop, engines[0], sampling, request_, **rollout)
    assert "stream" not in engines[0].sampled[0]


def test_a_response_whose_experts_are_asked_for_comes_whole(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    shape = RoutedExpertsShape((True,), 2, 4)
    with pytest.raises(ValueError, match="did not tell which experts it chose"):
        ask(loop, engines[0], replace(LONG, routed_experts=True), shape=shape)
    assert "stream" not in engines[0].sampled[0]


@pytest.mark.parametrize("num_parts", [0, 2])
def test_a_broken_connection_leaves_what_had_come(
    loop: EventLoop, engines: list[FakeSGLang], num_parts: int
) -> None:
    engines[0].num_parts = num_parts
    with pytest.raises(TransientError) as failure:
        ask(loop, engines[0])
    begun = failure.value.begun
    if num_parts == 0:
        assert begun is None
        return
    assert begun is not None and begun.response_ids == tuple(range(10, 522))
    assert begun.logprobs == tuple(-0.5 - t for t in range(512))
    [span] = begun.versions
    assert (span.start, span.stop, span.version) == (0, 512, 7)


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "too long", "code": 400}},
        sampled_answer(
            BODY, 0, finish_reason={"type": "abort", "message": "too long", "status_code": 400}
        ),
    ],
    ids=["event", "abort"],
)
def test_a_refusal_is_not_asked_for_again(
    loop: EventLoop, engines: list[FakeSGLang], answer: Any
) -> None:
    engines[0].answer = lambda body: (200, answer)
    with pytest.raises(RolloutError, match="refused a request with HTTP 400: too long"):
        ask(loop, engines[0])


def test_parts_that_repeat_tokens_are_refused() -> None:
    first, second, _ = cut_answer(sampled_answer(BODY, 0), 256)
    streamed = StreamedAnswer()
    streamed.add(first)
    second["output_ids"] = first["output_ids"] + second["output_ids"]
    with pytest.raises(ValueError, match="sent 768 tokens in parts, and drew 512"):
        streamed.add(second)


@pytest.mark.parametrize("num_unsent", [0, 256])
def test_an_abort_in_the_queue_repeats_what_came(num_unsent: int) -> None:
    """SGLang joins the part with others that the connection has not taken yet."""
    answer = sampled_answer(BODY, 0)
    first, second, _ = cut_answer(answer, 256)
    meta = {
        **second["meta_info"],
        "finish_reason": {"type": "abort", "message": "asked to"},
        "output_token_logprobs": answer["meta_info"]["output_token_logprobs"][:512],
    }
    unsent = slice(512 - num_unsent, 512)
    meta["output_token_logprobs"] = [
        *answer["meta_info"]["output_token_logprobs"][unsent],
        *meta["output_token_logprobs"],
    ]
    last = {"output_ids": [*answer["output_ids"][unsent], answer["output_ids"][511]]}
    streamed = StreamedAnswer()
    for part in (first, *([] if num_unsent else [second]), {**last, "meta_info": meta}):
        streamed.add(part)
    told = streamed.make_answer()
    assert told["output_ids"] == answer["output_ids"][:512]
    whole = answer["meta_info"]["output_token_logprobs"]
    assert told["meta_info"]["output_token_logprobs"] == whole[:512]
    assert told["meta_info"]["finish_reason"]["type"] == "abort" and streamed.is_whole


def test_an_answer_that_is_whole_outlives_its_connection(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    engines[0].num_parts = 3
    assert ask(loop, engines[0]).response_len == 600


def test_another_engine_goes_on_with_what_a_lost_one_has_drawn(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    engines[0].num_parts = 2
    sample = draw(loop, engines)
    [body] = engines[1].sampled
    assert body["input_ids"] == [5, 6, *range(10, 522)]
    assert body["sampling_params"]["max_new_tokens"] == 88
    assert sample.response_len == 600 and sample.engines == (0, 1)
    assert sample.logprobs[:512] == tuple(-0.5 - t for t in range(512))
    assert [(span.start, span.stop) for span in sample.versions] == [(0, 512), (512, 600)]


def test_what_older_weights_have_drawn_is_drawn_again(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    """The first engine has started again with the weights of its folder, and dies again."""
    engines[0].num_parts = 2
    sample = draw(loop, engines, (0, 7))
    [body] = engines[1].sampled
    assert body["input_ids"] == [5, 6]
    assert sample.response_len == 600 and sample.engines == (1,)


def test_what_a_lost_engine_has_drawn_ends_with_a_hold(
    loop: EventLoop, engines: list[FakeSGLang]
) -> None:
    """Weights may change until the request is posted again."""
    engines[0].num_parts = 2

    async def draw_around_hold() -> list[Sample]:
        async with make_client(engines).open() as session:
            work = asyncio.create_task(session.generate([PROMPT], 1, LONG))
            while not engines[0].sampled:
                await asyncio.sleep(0.001)
            await session.hold(cut_off=False)
            await session.resume()
            return await work

    [sample] = loop.run(draw_around_hold())
    [body] = engines[1].sampled
    assert body["input_ids"] == [5, 6]
    assert sample.response_len == 600 and sample.engines == (1,)
