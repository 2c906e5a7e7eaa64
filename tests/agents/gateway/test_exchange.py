"""Retries, lost connections and malformed requests, seen through a real server."""

import asyncio
import gc
import gzip
import json
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings

from mcore_rl.agents.gateway.api import BadRequestError
from mcore_rl.agents.gateway.exchange import parse_object
from mcore_rl.agents.gateway.sessions import OverloadedError
from tests.support.episode_chats import RecordingChat
from tests.support.gateways import (
    CuttingProxy,
    in_session,
    open_gateway,
    openai_client,
    port_of,
    post,
    until,
)
from tests.support.random_bodies import BODIES

HELLO: Any = [{"role": "user", "content": "hello"}]
PATHS = ("chat/completions", "responses", "messages")


@pytest.mark.parametrize(
    ("after_answer", "is_streamed"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_openais_client_gets_the_same_completion_after_its_connection_broke(
    after_answer, is_streamed
):
    gate = asyncio.Event()
    chat = RecordingChat(gate=gate)

    async def act(gateway, session):
        if after_answer:
            gate.set()
        proxy = CuttingProxy(port_of(gateway), num_cuts=2, after_answer=after_answer)
        async with (
            proxy.serve() as url,
            openai_client(session, base_url=f"{url}/v1", max_retries=4) as client,
        ):
            asking = asyncio.create_task(ask(client, is_streamed))
            await until(lambda: proxy.num_connections == 3)
            gate.set()
            assert await asking == "0: hello"
            assert await ask(client, is_streamed) == "1: hello"

    async def ask(client, is_streamed):
        done = await client.chat.completions.create(model="m", messages=HELLO, stream=is_streamed)
        if not is_streamed:
            return done.choices[0].message.content
        texts = [chunk.choices[0].delta.content async for chunk in done]
        return "".join(text or "" for text in texts)

    in_session(chat, act)
    assert len(chat.requests) == 2


def test_openais_client_waits_again_for_the_same_generation_after_its_timeout():
    gate = asyncio.Event()
    chat = RecordingChat(gate=gate)

    async def act(gateway, session):
        async with openai_client(session, timeout=0.2, max_retries=1) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="m", messages=HELLO)
        assert chat.num_running == 1
        gate.set()
        await until(lambda: chat.num_running == 0)
        async with openai_client(session) as client:
            done = await client.chat.completions.create(model="m", messages=HELLO)
        assert done.choices[0].message.content == "0: hello"

    in_session(chat, act)
    assert len(chat.requests) == 1


def test_openais_client_waits_and_asks_again_when_engines_are_busy():
    chat = RecordingChat(failures=[OverloadedError(0.05)])

    async def act(gateway, session):
        async with openai_client(session, max_retries=1) as client:
            done = await client.chat.completions.create(model="m", messages=HELLO)
        assert done.choices[0].message.content == "1: hello"

    in_session(chat, act)
    assert len(chat.requests) == 2


def test_equal_requests_are_samples_of_their_own():
    """One after the other, and at the same time."""
    chat = RecordingChat()

    async def act(gateway, session):
        async with openai_client(session) as client:

            async def ask():
                done = await client.chat.completions.create(model="m", messages=HELLO)
                return done.choices[0].message.content or ""

            assert [await ask(), await ask()] == ["0: hello", "1: hello"]
            texts = await asyncio.gather(*(ask() for _ in range(4)))
            assert sorted(texts) == [f"{turn}: hello" for turn in range(2, 6)]
        # Clients that close their connection after each answer have not lost it.
        url = f"{session.keyless_url}/v1/messages"
        answers = [await post(url, {"messages": HELLO}) for _ in range(2)]
        assert [body["content"][0]["text"] for _, body in answers] == ["6: hello", "7: hello"]

    in_session(chat, act)


def test_two_equal_requests_that_are_lost_get_two_answers():
    gate = asyncio.Event()
    chat = RecordingChat(gate=gate)

    async def act(gateway, session):
        url = f"{session.keyless_url}/v1/chat/completions"
        lost = [asyncio.create_task(post(url, {"messages": HELLO})) for _ in range(2)]
        await until(lambda: chat.num_running == 2)
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)
        await asyncio.sleep(0.05)
        again = [asyncio.create_task(post(url, {"messages": HELLO})) for _ in range(2)]
        await asyncio.sleep(0.05)
        gate.set()
        answers = await asyncio.gather(*again)
        contents = [body["choices"][0]["message"]["content"] for _, body in answers]
        assert sorted(contents) == ["0: hello", "1: hello"]

    in_session(chat, act)
    assert len(chat.requests) == 2


@pytest.mark.parametrize("path", PATHS)
def test_an_idempotency_key_stands_for_one_completion(path):
    chat = RecordingChat()

    async def act(gateway, session):
        url = f"{session.keyless_url}/v1/{path}"
        body = {"messages": HELLO, "input": "hello"}
        first = await post(url, body, {"Idempotency-Key": "a"})
        assert await post(url, body, {"Idempotency-Key": "a"}) == first
        assert await post(url, body, {"Idempotency-Key": "b"}) != first
        status, refused = await post(url, {**body, "model": "m"}, {"Idempotency-Key": "a"})
        assert status == 400
        assert "Idempotency-Key" in refused["error"]["message"]

    in_session(chat, act)
    assert len(chat.requests) == 2


def test_a_completion_is_forgotten_after_the_window():
    chat = RecordingChat()

    async def act(gateway, session):
        url = f"{session.keyless_url}/v1/chat/completions"
        for _ in range(2):
            await post(url, {"messages": HELLO}, {"Idempotency-Key": "a"})
            await asyncio.sleep(0.1)

    in_session(chat, act, retry_window_s=0.05)
    assert len(chat.requests) == 2


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_does_not_come_is_a_timeout_which_a_retry_survives(is_streamed):
    gate = asyncio.Event()
    chat = RecordingChat(gate=gate)

    async def act(gateway, session):
        url = f"{session.keyless_url}/v1/chat/completions"
        body = {"messages": HELLO, "stream": is_streamed}
        status, refused = await post(url, body)
        assert (status, refused["error"]["code"]) == (504, "timeout")
        gate.set()
        await until(lambda: chat.num_running == 0)
        headers = {"x-stainless-retry-count": "1"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json=body, headers=headers) as response,
        ):
            assert b"0: hello" in await response.read()

    in_session(chat, act, answer_s=0.1)
    assert len(chat.requests) == 1


def test_a_body_that_is_too_large_is_refused():
    async def act(gateway, session):
        body = {"messages": [{"role": "user", "content": "x" * 2000}], "input": "x" * 2000}
        for path in PATHS:
            status, refused = await post(f"{session.keyless_url}/v1/{path}", body)
            assert (status, bool(refused["error"]["message"])) == (413, True)
        bomb = gzip.compress(json.dumps(body).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        url = f"{session.keyless_url}/v1/messages"
        assert (await post(url, data=bomb, headers=headers))[0] == 413
        own = {"Authorization": f"Bearer {session.key}"}
        url = f"{gateway.url}/sessions/{session.id}/reward"
        assert (await post(url, body, own))[0] == 413

    in_session(RecordingChat(), act, max_body_bytes=1000)


def test_a_body_that_does_not_arrive_is_not_waited_for():
    async def act(gateway, session):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
        path = session.keyless_url.removeprefix(gateway.url)
        writer.write(
            f"POST {path}/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{{".encode()
        )
        assert b" 408 " in await reader.readline()
        writer.close()

    in_session(RecordingChat(), act, body_s=0.1)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b'"\\ud800"', b"\xff", b"[" * 5000])
def test_malformed_json_is_a_bad_request(data):
    with pytest.raises(BadRequestError, match="body"):
        parse_object(data)


def test_bodies_in_a_broken_encoding_are_bad_requests():
    async def act(gateway, session):
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        url = f"{session.keyless_url}/v1/messages"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, data=b"no gzip", headers=headers) as response,
        ):
            assert response.status == 400

    in_session(RecordingChat(), act)


def test_no_body_makes_the_server_fail():
    bodies: list[object] = [{"model": "m", "messages": HELLO}]

    @settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
    @given(BODIES)
    def collect(body):
        bodies.append(body)

    collect()
    statuses = set()

    async def run():
        async with open_gateway() as gateway, aiohttp.ClientSession() as client:
            for body in bodies:
                session = gateway.open_session(RecordingChat(policy=lambda *_: {"content": "x"}))
                data = json.dumps(body).encode()
                own = {"Authorization": f"Bearer {session.key}"}
                urls = [f"{gateway.url}/v1/{path}" for path in PATHS]
                urls.append(f"{gateway.url}/v1/messages/count_tokens")
                for url in [*urls, f"{gateway.url}/sessions/{session.id}/reward"]:
                    async with client.post(url, data=data, headers=own) as response:
                        await response.read()
                        statuses.add(response.status)
                        assert response.status in (200, 400), (url, body, await response.text())
                await gateway.close_session(session.key)

    asyncio.run(run())
    assert statuses == {200, 400}


def test_what_is_kept_for_a_retry_holds_no_request():
    chat = RecordingChat()

    async def act(gateway, session):
        body = {"messages": [{"role": "user", "content": "a long conversation"}]}
        await post(f"{session.keyless_url}/v1/chat/completions", body)
        await asyncio.sleep(0.05)
        gc.collect()
        requests = [found for found in gc.get_objects() if isinstance(found, web.Request)]
        assert not [found for found in requests if b"a long" in (found._read_bytes or b"")]

    in_session(chat, act)
    assert len(chat.answers) == 1
