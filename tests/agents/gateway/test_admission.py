"""Requests beyond the bounds are refused in each API's own words, and come again."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from mcore_rl.agents.gateway.admission import Admission, AdmissionOptions, GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway
from mcore_rl.agents.gateway.sessions import OverloadedError
from tests.support.episode_chats import RecordingChat
from tests.support.gateways import DEADLINE_S, in_session, openai_client, post, until

HELLO: Any = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "responses": {"input": "hello"},
    "messages": {"messages": HELLO, "max_tokens": 9},
}


async def nothing(event: asyncio.Event) -> None:
    await event.wait()


def admission(free: float | None = None, **options: Any) -> Admission:
    return Admission(AdmissionOptions(**options), lambda: free)


async def with_running(chosen: Admission, number: int, check: Callable[[], None]) -> None:
    event = asyncio.Event()
    tasks = [asyncio.create_task(nothing(event)) for _ in range(number)]
    for task in tasks:
        chosen.begin(task)
    try:
        check()
    finally:
        event.set()
        await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert chosen.num_running == 0


@pytest.mark.parametrize(
    ("options", "free", "running", "is_refused"),
    [
        ({}, 0.0, 99, False),
        ({"max_requests": 2}, None, 1, False),
        ({"max_requests": 2}, None, 2, True),
        ({"min_free_kv": 0.1}, 0.2, 5, False),
        ({"min_free_kv": 0.1}, 0.05, 5, True),
        ({"min_free_kv": 0.1}, 0.05, 0, False),
        ({"min_free_kv": 0.1}, None, 5, False),
    ],
)
def test_bounds(options: Any, free: float | None, running: int, is_refused: bool) -> None:
    chosen = admission(free, retry_after_s=0.5, **options)

    def check() -> None:
        if not is_refused:
            chosen.check()
            return
        with pytest.raises(OverloadedError) as refused:
            chosen.check()
        assert refused.value.retry_after_s == 0.5

    asyncio.run(with_running(chosen, running, check))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_requests": -1}, "max_requests=-1"),
        ({"min_free_kv": 1.0}, r"min_free_kv=1\.0: must lie in \[0, 1\)"),
        ({"wait_s": -1.0}, r"wait_s=-1\.0"),
        ({"retry_after_s": 0.0}, r"retry_after_s=0\.0"),
    ],
)
def test_wrong_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdmissionOptions(**options)


@pytest.mark.parametrize("path", REQUESTS)
def test_each_api_refuses_in_its_own_words_and_then_takes_the_retry(path: str) -> None:
    chat = RecordingChat(gate=asyncio.Event())
    bounds = AdmissionOptions(max_requests=1, retry_after_s=0.25)

    async def act(gateway: Gateway, session: Any) -> None:
        assert chat.gate is not None
        url, headers = f"{gateway.url}/v1/{path}", {"x-api-key": session.key}
        first = asyncio.create_task(post(url, REQUESTS[path], headers))
        await until(lambda: chat.num_running == 1)
        body = {**REQUESTS[path], "model": "another request"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json=body, headers=headers) as raw,
        ):
            assert raw.status == 429
            assert (raw.headers["Retry-After"], raw.headers["retry-after-ms"]) == ("1", "250")
            told = await raw.json()
        error = told["error"]
        assert error["type"] == "rate_limit_error" and error["code"] == "overloaded"
        assert ("param" in error) == (path != "messages")
        assert (told.get("type") == "error") == (path == "messages")
        assert len(chat.requests) == 1
        chat.gate.set()
        assert (await first)[0] == 200
        assert (await post(url, body, headers))[0] == 200
        metrics = await gateway.close_session(session.key)
        assert metrics["refused"] == 1 and metrics["answer_s"] > 0

    in_session(chat, act, admission=bounds)


def test_a_client_of_openai_comes_again_until_it_is_taken() -> None:
    chat = RecordingChat(gate=asyncio.Event())
    bounds = AdmissionOptions(max_requests=1, retry_after_s=0.05)

    async def act(gateway: Gateway, session: Any) -> None:
        assert chat.gate is not None
        async with openai_client(session, max_retries=500) as client:
            asked = [
                asyncio.create_task(client.chat.completions.create(model=name, messages=HELLO))
                for name in ("a", "b")
            ]
            await until(lambda: chat.num_running == 1)
            await asyncio.sleep(0.2)
            assert len(chat.requests) == 1
            chat.gate.set()
            await asyncio.gather(*asked)
        assert len(chat.requests) == 2
        assert (await gateway.close_session(session.key))["refused"] >= 1

    in_session(chat, act, admission=bounds)


def test_equal_requests_that_are_refused_are_samples_of_their_own() -> None:
    chat = RecordingChat(gate=asyncio.Event())
    bounds = AdmissionOptions(max_requests=1)

    async def act(gateway: Gateway, session: Any) -> None:
        assert chat.gate is not None
        url, key = f"{gateway.url}/v1/chat/completions", {"x-api-key": session.key}
        first = asyncio.create_task(post(url, {"messages": HELLO}, key))
        await until(lambda: chat.num_running == 1)
        assert (await post(url, {"messages": HELLO}, key))[0] == 429
        again = {**key, "x-stainless-retry-count": "1"}
        assert (await post(url, {"messages": HELLO}, again))[0] == 429
        chat.gate.set()
        answers = [await first, await post(url, {"messages": HELLO}, again)]
        contents = [body["choices"][0]["message"]["content"] for _, body in answers]
        assert contents == ["0: hello", "1: hello"]

    in_session(chat, act, admission=bounds)


def test_a_request_waits_for_its_turn_and_is_then_answered() -> None:
    """Neither needs the client to come again: some, such as that of verifiers, never do."""
    chat = RecordingChat(gate=asyncio.Event())
    bounds = AdmissionOptions(max_requests=1, wait_s=DEADLINE_S)

    async def act(gateway: Gateway, session: Any) -> None:
        assert chat.gate is not None
        async with openai_client(session) as client:
            asked = [
                asyncio.create_task(client.chat.completions.create(model=name, messages=HELLO))
                for name in "abc"
            ]
            await until(lambda: chat.num_running == 1)
            await asyncio.sleep(0.2)
            assert len(chat.requests) == 1
            chat.gate.set()
            await asyncio.gather(*asked)
        assert (await gateway.close_session(session.key))["refused"] == 0

    in_session(chat, act, admission=bounds)


def test_a_client_that_leaves_while_it_waits_costs_no_generation() -> None:
    chat = RecordingChat(gate=asyncio.Event())
    bounds = AdmissionOptions(max_requests=1, wait_s=DEADLINE_S)

    async def act(gateway: Gateway, session: Any) -> None:
        assert chat.gate is not None
        async with openai_client(session) as client, openai_client(session) as hasty:
            first = asyncio.create_task(client.chat.completions.create(model="a", messages=HELLO))
            await until(lambda: chat.num_running == 1)
            with pytest.raises(openai.APITimeoutError):
                await hasty.with_options(timeout=0.2).chat.completions.create(
                    model="b", messages=HELLO
                )
            chat.gate.set()
            await first
            await client.chat.completions.create(model="c", messages=HELLO)
        assert len(chat.requests) == 2

    in_session(chat, act, admission=bounds)


def test_a_gateway_asks_for_the_room_of_the_engines() -> None:
    room = [0.5]
    chat = RecordingChat(gate=asyncio.Event())

    async def run() -> None:
        options = GatewayOptions(admission=AdmissionOptions(min_free_kv=0.1))
        async with (
            asyncio.timeout(DEADLINE_S),
            Gateway(chr, options, free_kv=lambda: room[0]) as gateway,
        ):
            assert chat.gate is not None
            session = gateway.open_session(chat)
            url, headers = f"{session.openai_url}/chat/completions", {"x-api-key": session.key}
            first = asyncio.create_task(post(url, {"messages": HELLO}, headers))
            await until(lambda: chat.num_running == 1)
            room[0] = 0.05
            assert (await post(url, {"messages": HELLO, "seed": 1}, headers))[0] == 429
            chat.gate.set()
            assert (await first)[0] == 200

    asyncio.run(run())
