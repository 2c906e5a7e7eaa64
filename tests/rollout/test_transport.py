"""Requests over HTTP: what is sent, and which failures are worth another try."""

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.config import RolloutConfig
from mcore_rl.data.images.shared_patches import SharedPatches
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.request import EngineAffinity, Request, RoutedExpertsShape, Sampling
from mcore_rl.rollout.transport import AbortedError, HttpOptions, RolloutError, TransientError
from mcore_rl.types import Prompt, Sample
from tests.support.fake_sglang import FakeSGLang, Route, sampled_answer
from tests.support.image_prompts import make_image, make_patches

REQUEST = Request(Prompt(3, (5, 6), (), "unit", ""), 1, EngineAffinity(2))
SAMPLING = Sampling(2, seed=4, routed_experts=True)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def engine(loop: EventLoop) -> Iterator[FakeSGLang]:
    engine = FakeSGLang(loop)
    yield engine
    engine.stop()


def sample(loop: EventLoop, engine: FakeSGLang, rollout: RolloutConfig) -> Sample:
    async def ask() -> Sample:
        async with HttpOptions.make(rollout, [9], str).open() as transport:
            return await transport.sample(engine.address, REQUEST, SAMPLING)

    return loop.run(ask())


@pytest.mark.parametrize("deterministic", [False, True])
def test_seeds_go_to_engines_that_sample_by_them(
    loop: EventLoop, engine: FakeSGLang, deterministic: bool
) -> None:
    answer = sample(loop, engine, RolloutConfig(deterministic=deterministic))
    assert (answer.response_ids, answer.text, answer.sample_index) == ((10, 11), "(10, 11)", 1)
    [body] = engine.sampled
    assert ("sampling_seed" in body["sampling_params"]) == deterministic
    assert not body["return_routed_experts"], "the engines were started without"


@pytest.mark.parametrize(
    ("route", "error", "message"),
    [
        ((500, "down"), TransientError, "HTTP 500: down"),
        ((400, "too long"), RolloutError, r"log fake.log\) refused .* HTTP 400: too long"),
    ],
)
def test_errors_of_a_server_may_be_retried_and_refusals_not(
    loop: EventLoop, engine: FakeSGLang, route: Route, error: type[Exception], message: str
) -> None:
    engine.answer = lambda body: route
    with pytest.raises(error, match=message):
        sample(loop, engine, RolloutConfig())


def test_an_engine_that_gives_up_or_is_gone_may_be_asked_again(
    loop: EventLoop, engine: FakeSGLang
) -> None:
    reason = {"type": "abort", "message": "out of memory"}
    engine.answer = lambda body: (200, sampled_answer(body, 0, finish_reason=reason))
    with pytest.raises(AbortedError, match="aborted it: out of memory"):
        sample(loop, engine, RolloutConfig())
    engine.stop()
    with pytest.raises(TransientError, match="ClientConnectorError: "):
        sample(loop, engine, RolloutConfig())


def test_all_requests_of_an_engine_are_ended(loop: EventLoop, engine: FakeSGLang) -> None:
    engine.num_free = 0

    async def ask_and_abort() -> None:
        async with HttpOptions.make(RolloutConfig(), [9], str).open() as transport:
            asking = asyncio.create_task(transport.sample(engine.address, REQUEST, SAMPLING))
            while not engine.sampled:
                await asyncio.sleep(0.01)
            await transport.abort_all(engine.address)
            with pytest.raises(AbortedError):
                await asking

    loop.run(ask_and_abort())


@pytest.mark.parametrize(("rid", "num_begun"), [("a", 1), ("", 0)])
def test_what_was_drawn_comes_with_the_abort_of_a_request_with_a_name(
    loop: EventLoop, engine: FakeSGLang, rid: str, num_begun: int
) -> None:
    reason = {"type": "abort", "message": "asked to"}
    body = {"sampling_params": {"max_new_tokens": 1}}
    engine.answer = lambda _: (200, sampled_answer(body, 0, finish_reason=reason))

    async def ask() -> None:
        async with HttpOptions.make(RolloutConfig(), [9], str).open() as transport:
            await transport.sample(engine.address, replace(REQUEST, rid=rid), SAMPLING)

    with pytest.raises(AbortedError, match="asked to") as aborted:
        loop.run(ask())
    begun = aborted.value.begun
    assert (begun.response_len if begun else 0) == num_begun


@pytest.mark.parametrize(("ids", "limit", "end"), [([8, 9], 3, "stop"), ([8, 7], 2, "length")])
def test_a_response_that_was_whole_when_it_was_aborted_is_no_part(
    loop: EventLoop, engine: FakeSGLang, ids: list[int], limit: int, end: str
) -> None:
    """SGLang draws one token after an abort, and does not check whether it ends the response."""
    changes = {
        "finish_reason": {"type": "abort", "message": "asked to"},
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    body = {"sampling_params": {"max_new_tokens": len(ids)}}
    answer = {**sampled_answer(body, 0, **changes), "output_ids": ids}
    engine.answer = lambda _: (200, answer)

    async def ask() -> Sample:
        async with HttpOptions.make(RolloutConfig(), [9], str).open() as transport:
            return await transport.sample(
                engine.address, replace(REQUEST, rid="a"), Sampling(limit)
            )

    whole = loop.run(ask())
    assert (whole.response_ids, whole.finish_reason) == (tuple(ids), end)


@pytest.mark.parametrize("experts", [[2, 1], []])
def test_what_was_drawn_goes_on_elsewhere_only_with_its_experts(
    loop: EventLoop, engine: FakeSGLang, experts: list[int]
) -> None:
    """A request that waits to be computed again is aborted with its tokens, without experts."""
    reason = {"type": "abort", "message": "asked to"}
    encoded = base64.b64encode(np.array(experts, np.int32).tobytes()).decode()
    changes = {"routed_experts": encoded} if experts else {}
    body = {"sampling_params": {"max_new_tokens": 1}}
    engine.answer = lambda _: (200, sampled_answer(body, 0, finish_reason=reason, **changes))
    shape = RoutedExpertsShape((True,), top_k=1, num_experts=4)

    async def ask() -> None:
        async with HttpOptions.make(RolloutConfig(), [9], str, shape).open() as transport:
            await transport.sample(engine.address, replace(REQUEST, rid="a"), SAMPLING)

    with pytest.raises(AbortedError, match="asked to") as aborted:
        loop.run(ask())
    begun = aborted.value.begun
    if not experts:
        assert begun is None
    else:
        assert begun is not None and begun.routed_experts is not None
        assert begun.response_ids == (10,) and begun.routed_experts.flatten().tolist() == experts


def test_one_request_is_ended_by_its_name(loop: EventLoop, engine: FakeSGLang) -> None:
    async def end() -> None:
        async with HttpOptions.make(RolloutConfig(), [9], str).open() as transport:
            await transport.abort(engine.address, "a")

    loop.run(end())
    assert engine.calls == [("/abort_request", {"rid": "a"})]


def ask_with_images(
    loop: EventLoop, engine: FakeSGLang, patches: SharedPatches | None, num_requests: int = 1
) -> list[Sample]:
    images = (make_image("a"), make_image("b", 1))
    request = replace(REQUEST, prompt=replace(REQUEST.prompt, images=images))
    options = replace(HttpOptions.make(RolloutConfig(), [9], str), patches=patches)

    async def ask() -> list[Sample]:
        async with options.open() as transport:
            return [
                await transport.sample(engine.address, request, SAMPLING)
                for _ in range(num_requests)
            ]

    return loop.run(ask())


@pytest.mark.parametrize("is_far", [False, True])
def test_engines_map_the_patches_or_get_them(
    loop: EventLoop, engine: FakeSGLang, tmp_path: Path, is_far: bool
) -> None:
    engine.is_far = is_far
    patches = SharedPatches(make_patches, 1 << 20, str(tmp_path))
    samples = ask_with_images(loop, engine, patches, 2)
    assert [sample.response_ids for sample in samples] == [(10, 11)] * 2
    assert patches.num_made == 2
    wanted = [make_patches(make_image("a")), make_patches(make_image("b", 1))]
    assert [as_files for as_files, _, _ in engine.images] == [not is_far] * 2
    for _, pixels_PD, grids_I3 in engine.images:
        assert torch.equal(pixels_PD, torch.cat([each.pixels_PD for each in wanted]))
        assert grids_I3.tolist() == [list(each.grid) for each in wanted]
    assert [tuple(body["input_ids"]) for body in engine.sampled] == [(5, 6)] * 2


def test_a_command_without_patches_refuses_images(loop: EventLoop, engine: FakeSGLang) -> None:
    with pytest.raises(RolloutError, match="prompt 3 of 'unit' has images, but this command"):
        ask_with_images(loop, engine, None)


@pytest.mark.parametrize("at", [0, 1])
def test_a_log_prob_that_is_no_number_is_refused(
    loop: EventLoop, engine: FakeSGLang, at: int
) -> None:
    """SGLang writes NaN as null."""
    entries: list[list[float | int | None]] = [[-0.5, 10, None], [-1.5, 11, None]]
    entries[at][0] = None
    engine.answer = lambda body: (200, sampled_answer(body, 4, output_token_logprobs=entries))
    drawn = rf"drew token {at} of prompt 3 of 'unit', sample 1, .* from weights 4"
    with pytest.raises(RolloutError, match=rf"engine {engine.url} .*{drawn}"):
        sample(loop, engine, RolloutConfig())
