"""A gateway on loopback: keys, errors, rewards, and nothing left after closing."""

import asyncio
import gc
import json
import logging
from typing import Any

import openai
import pytest

from mcore_rl.agents.gateway.admission import GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway
from mcore_rl.agents.gateway.sessions import OpenSession, OverloadedError
from mcore_rl.agents.messages import ConversationError, EndReason, EpisodeEndedError
from tests.support.episode_chats import RecordingChat
from tests.support.gateways import in_session, open_gateway, openai_client, post

HELLO: Any = [{"role": "user", "content": "hello"}]


def test_a_session_is_found_by_key_by_url_and_by_its_id_with_the_runs_key():
    async def act(gateway, session):
        for path, headers in {
            ("/v1", (("Authorization", f"Bearer {session.key}"),)),
            ("/v1", (("x-api-key", session.key),)),
            (f"/s/{session.id}/v1", ()),
            (f"/s/{session.id}/v1", (("Authorization", "Bearer EMPTY"),)),
            (f"/s/{session.id}/v1", (("Authorization", f"Bearer {gateway.run_key}"),)),
            (
                "/v1",
                (("Authorization", f"Bearer {gateway.run_key}"), ("X-Session-ID", session.id)),
            ),
        }:
            url = f"{gateway.url}{path}/chat/completions"
            status, body = await post(url, {"messages": HELLO}, dict(headers))
            assert status == 200, body
            assert (await post(f"{gateway.url}{path}/models", headers=dict(headers)))[0] == 200

    in_session(RecordingChat(), act)


def test_wrong_keys_are_refused_in_the_apis_own_words():
    async def act(gateway, session):
        other = gateway.open_session(RecordingChat())
        for path, headers in {
            ("/v1", ()),
            ("/v1", (("Authorization", "Bearer sk-unknown"),)),
            ("/v1", (("Authorization", f"Bearer {session.id}"),)),
            ("/v1", (("Authorization", f"Bearer {gateway.run_key}"),)),
            ("/v1", (("X-Session-ID", session.id),)),
            ("/v1", (("X-Session-ID", session.id), ("Authorization", "Bearer sk-unknown"))),
            ("/s/unknown/v1", (("Authorization", f"Bearer {session.key}"),)),
            (f"/s/{session.id}/v1", (("Authorization", f"Bearer {other.key}"),)),
        }:
            url = f"{gateway.url}{path}/"
            status, body = await post(url + "chat/completions", {"messages": HELLO}, dict(headers))
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            status, body = await post(url + "messages", {"messages": HELLO}, dict(headers))
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        async with openai_client(other, base_url=f"{session.keyless_url}/v1") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    chat = RecordingChat()
    in_session(chat, act)
    assert not chat.requests


def test_rewards_and_progress_need_the_sessions_key():
    chat = RecordingChat()

    async def act(gateway, session):
        other = gateway.open_session(RecordingChat())
        url = f"{gateway.url}/sessions/{session.id}"
        key = {"Authorization": f"Bearer {session.key}"}
        await post(f"{gateway.url}/v1/chat/completions", {"messages": HELLO}, key)
        assert await post(url, headers=key) == (
            200,
            {"turns": 1, "prompt_tokens": 2, "sampled_tokens": 8},
        )
        assert (await post(f"{url}/reward", {"reward": 1.0, "turn": None}, key))[0] == 200
        assert (await post(f"{url}/reward", {"reward": 2, "turn": 0}, key))[0] == 200
        for wrong in ({}, {"reward": "1"}, {"reward": 1, "turn": 5}, {"reward": 1, "turn": -1}):
            assert (await post(f"{url}/reward", wrong, key))[0] == 400
        assert (await post(f"{url}/reward", data=b'{"reward": 1e999}', headers=key))[0] == 400
        for headers in ({}, {"Authorization": f"Bearer {other.key}"}):
            assert (await post(url, headers=headers))[0] == 401
            assert (await post(f"{url}/reward", {"reward": 1.0}, headers))[0] == 401

    in_session(chat, act)
    assert chat.rewards == [(1.0, None), (2.0, 0)]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EpisodeEndedError(EndReason.MAX_TURNS, "8 turns"), 400, "episode_over"),
        (RuntimeError("boom"), 500, "policy_failed"),
        (ConversationError("the template wants a user first"), 400, "invalid_messages"),
        (OverloadedError(0.25), 429, "overloaded"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_failures_have_a_status_that_tells_clients_whether_to_retry(
    failure, status, code, is_streamed, caplog
):
    async def act(gateway, session):
        async with openai_client(session) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=HELLO, stream=is_streamed)
        assert (caught.value.status_code, caught.value.code) == (status, code)
        if status == 429:
            assert caught.value.response.headers["Retry-After"] == "1"
            assert caught.value.response.headers["retry-after-ms"] == "250"
        if code == "episode_over":
            assert "max_turns: 8 turns" in caught.value.message

    in_session(RecordingChat(failures=[failure]), act)
    assert ("boom" in caplog.text) == (status == 500)


def test_sampling_parameters_are_ignored_and_named_once(caplog):
    chat = RecordingChat()

    async def act(gateway, session):
        async with openai_client(session) as client:
            for _ in range(2):
                raw = await client.chat.completions.with_raw_response.create(
                    model="m", messages=HELLO, temperature=0.2, seed=3, user="someone"
                )
                assert raw.headers["X-Ignored-Parameters"] == "seed, temperature"
                assert raw.headers["X-Episode-Turn"] == str(len(chat.requests) - 1)

    with caplog.at_level(logging.WARNING):
        in_session(chat, act)
    assert caplog.text.count("have no effect") == 1


def test_closing_a_session_ends_what_it_generates_and_leaves_nothing():
    gate = asyncio.Event()
    chat = RecordingChat(gate=gate)

    async def act(gateway, session):
        before = asyncio.all_tasks()
        key = {"Authorization": f"Bearer {session.key}"}
        url = f"{gateway.url}/v1/chat/completions"
        waiting = [
            asyncio.create_task(post(url, {"messages": HELLO, "stream": stream}, key))
            for stream in (False, True)
        ]
        while chat.num_running < 2:
            await asyncio.sleep(0.01)
        await gateway.close_session(session.key)
        assert chat.num_running == 0
        for status, body in await asyncio.gather(*waiting):
            assert (status, body["error"]["code"]) == (400, "episode_over")
        assert (await post(url, {"messages": HELLO}, key))[0] == 401
        with pytest.raises(ValueError, match="no open session"):
            await gateway.close_session(session.key)
        await asyncio.sleep(0.05)
        of_sessions = [
            task for task in asyncio.all_tasks() - before if "generate" in repr(task.get_coro())
        ]
        assert not of_sessions
        gc.collect()
        kept = [o for o in gc.get_objects() if isinstance(o, OpenSession) and o.chat is chat]
        assert not kept

    in_session(chat, act)


def test_closing_the_gateway_frees_its_port():
    async def run():
        async with open_gateway() as gateway:
            gateway.open_session(RecordingChat())
            port = int(gateway.url.rpartition(":")[2])
        assert gateway.num_sessions == 0
        async with Gateway(chr, GatewayOptions(port=port)) as again:
            assert again.url == gateway.url

    asyncio.run(run())


def test_keys_are_neither_shown_nor_logged(caplog):
    async def act(gateway, session):
        secrets = (session.key, session.id, gateway.run_key)
        async with openai_client(session) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=HELLO)
        status, body = await post(f"{session.openai_url}/nothing", {})
        assert status == 404
        text = caplog.text + repr(session) + json.dumps(body)
        assert not [secret for secret in secrets if secret in text]

    with caplog.at_level(logging.DEBUG):
        in_session(RecordingChat(failures=[RuntimeError("boom")]), act)


def test_a_path_that_is_no_api_and_a_wrong_method_are_answered_in_json():
    async def act(gateway, session):
        status, body = await post(f"{gateway.url}/v1/embeddings", {})
        assert (status, body["error"]["code"]) == (404, "not_found")
        status, body = await post(f"{gateway.url}/v1/messages")
        assert (status, body["type"]) == (405, "error")

    in_session(RecordingChat(), act)


def test_a_request_chooses_who_answers_by_its_model():
    chat = RecordingChat()

    async def act(gateway, session):
        url = f"{session.keyless_url}/v1"
        for path in ("chat/completions", "messages", "responses"):
            said = {"input": "hello"} if path == "responses" else {"messages": HELLO}
            for model in ("ada", "base"):
                body = {**said, "model": model, "max_tokens": 9}
                status, answer = await post(f"{url}/{path}", body)
                assert (status, answer["model"]) == (200, model), answer
            status, answer = await post(f"{url}/{path}", {**said, "model": "m", "max_tokens": 9})
            assert status == 404
            assert answer["error"]["message"] == "no model is named 'm': name one of ada, base"
        _, models = await post(f"{url}/models")
        assert [model["id"] for model in models["data"]] == ["ada", "base"]
        assert (await post(f"{url}/models/base"))[1]["id"] == "base"
        assert (await post(f"{url}/models/m"))[0] == 404

    in_session(chat, act, model="ada", adapters=("base",))
    assert [request.adapter for request in chat.requests] == ["", "base"] * 3


def test_anthropics_token_count_and_models():
    async def act(gateway, session):
        body = {"messages": HELLO, "model": "m"}
        url = f"{session.keyless_url}/v1"
        assert await post(f"{url}/messages/count_tokens", body) == (200, {"input_tokens": 7})
        _, models = await post(f"{url}/models")
        assert [model["id"] for model in models["data"]] == ["policy"]
        assert (await post(f"{url}/models/other/name"))[1]["id"] == "other/name"

    in_session(RecordingChat(), act)
