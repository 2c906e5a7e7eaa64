"""Clients of the APIs, real ones where the environment has them, speak to a real gateway."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from mcore_rl.agents.messages import EndReason, EpisodeEndedError
from tests.support.episode_chats import RecordingChat, say, think_and_call
from tests.support.gateway_answers import assembled
from tests.support.gateways import (
    CuttingProxy,
    in_session,
    open_gateway,
    openai_client,
    port_of,
)

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
FLAT_TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


def test_openais_client_gets_an_answer_and_its_tokens():
    chat = RecordingChat()

    async def act(gateway, session):
        async with openai_client(session) as client:
            done = await client.chat.completions.create(
                model="any",
                messages=HELLO,
                max_tokens=9,
                stop=["END"],
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
        body = done.model_dump()
        (choice,) = body["choices"]
        assert choice["message"]["content"] == "0: hello"
        assert (choice["finish_reason"], body["model"]) == ("stop", "any")
        assert body["prompt_token_ids"] == [5, 6]
        assert choice["token_ids"] == [ord(letter) for letter in "0: hello"]
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == list("0: hello")
        assert [entry["logprob"] for entry in entries] == [-0.5 - t for t in range(8)]
        assert body["usage"]["total_tokens"] == 10

    in_session(chat, act)
    assert chat.requests[0].max_tokens == 9
    assert chat.requests[0].stop == ("END",)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_with_tools_comes_back_as_it_was_said(is_streamed):
    """The client sends parallel calls, reasoning and exact arguments back to the recorder."""
    said = think_and_call('{"where":  "Zürich"}', "{}", content="two looks")
    chat = RecordingChat(say(said, {"role": "assistant", "content": "done"}))

    async def act(gateway, session):
        async with openai_client(session) as client:
            message = await chat_message(client, HELLO, is_streamed)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
                for call in message["tool_calls"]
            ]
            last = await chat_message(client, [*HELLO, message, *results], is_streamed)
        assert last["content"] == "done"

    in_session(chat, act)
    assert not chat.strangers
    assert [m["role"] for m in chat.requests[1].messages] == ["user", "assistant", "tool", "tool"]
    assert chat.requests[1].messages[1] == said


async def chat_message(client, messages, is_streamed):
    """The assistant's message as a dict, put together from chunks if streamed."""
    given = {"model": "any", "messages": messages, "tools": TOOLS}
    if not is_streamed:
        done = await client.chat.completions.create(**given)
        return done.choices[0].message.model_dump()
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    async for chunk in await client.chat.completions.create(stream=True, **given):
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["tool_calls"] += delta.get("tool_calls") or []
    return message


def test_the_responses_client_goes_on_from_its_previous_response():
    said = think_and_call('{"a": 1}', '{"b":2}')
    chat = RecordingChat(say(said, {"role": "assistant", "content": "done"}))

    async def act(gateway, session):
        async with openai_client(session) as client:
            first = await client.responses.create(
                model="m", input="hello", instructions="be short", tools=FLAT_TOOLS
            )
            calls = [item for item in first.output if item.type == "function_call"]
            outputs: Any = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
                for call in calls
            ]
            second = await client.responses.create(
                model="m", input=outputs, previous_response_id=first.id, tools=FLAT_TOOLS
            )
            assert second.output_text == "done"
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="x", previous_response_id="resp_0")
            assert caught.value.code == "previous_response_not_found"

    in_session(chat, act)
    assert [m["role"] for m in chat.requests[0].messages] == ["system", "user"]
    assert [m["role"] for m in chat.requests[1].messages] == ["user", "assistant", "tool", "tool"]
    assert chat.requests[1].messages[1] == said


def test_the_responses_client_reads_the_stream_and_sends_all_items_back():
    said = think_and_call('{"a": 1}', content="look")
    chat = RecordingChat(say(said, {"role": "assistant", "content": "done"}))

    async def act(gateway, session):
        async with openai_client(session) as client:
            given: Any = [{"role": "user", "content": "hello"}]
            async with client.responses.stream(
                model="m", input=given, store=False, tools=FLAT_TOOLS
            ) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            assert "response.output_text.delta" in kinds
            items: Any = [
                item.model_dump(exclude={"parsed", "parsed_arguments"}) for item in first.output
            ]
            output: Any = {"type": "function_call_output", "call_id": "call_0", "output": "seen"}
            second = await client.responses.create(
                model="m", input=[*given, *items, output], store=False, tools=FLAT_TOOLS
            )
            assert second.output_text == "done"

    in_session(chat, act)
    assert chat.requests[1].messages[1] == said


def test_the_client_does_not_repeat_a_request_to_an_episode_that_is_over():
    chat = RecordingChat(failures=[EpisodeEndedError(EndReason.DONE)] * 5)

    async def act(gateway, session):
        async with openai_client(session, max_retries=3) as client:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=HELLO)

    in_session(chat, act)
    assert len(chat.requests) == 1


def test_a_stream_shows_signs_of_life_and_tells_of_a_late_failure():
    async def act(gateway, session):
        url = f"{session.keyless_url}/v1/"
        async with aiohttp.ClientSession() as client:
            for path, sign in {
                "chat/completions": b": the policy",
                "messages": b"event: ping",
                "responses": b": the policy",
            }.items():
                body = {"messages": HELLO, "input": "hello", "stream": True}
                async with client.post(url + path, json=body) as response:
                    assert response.status == 200
                    assert response.content_type == "text/event-stream"
                    lines = [await response.content.readline() for _ in range(4)]
                    assert sign in b"".join(lines)
                    gate.set()
                    rest = await response.read()
                    assert b"RuntimeError" in rest
                    assert b"policy_failed" in rest
                gate.clear()

    gate = asyncio.Event()
    chat = RecordingChat(gate=gate, failures=[RuntimeError("late")] * 3)
    in_session(chat, act, keep_alive_s=0.02)


def test_two_hundred_sessions_at_once_keep_apart():
    async def run():
        chats = [RecordingChat() for _ in range(200)]
        async with open_gateway() as gateway, aiohttp.ClientSession() as client:

            async def play(number):
                session = gateway.open_session(chats[number])
                messages = [{"role": "user", "content": f"I am {number}"}]
                for _ in range(3):
                    headers = {"Authorization": f"Bearer {session.key}"}
                    url = f"{gateway.url}/v1/chat/completions"
                    async with client.post(
                        url, json={"messages": messages}, headers=headers
                    ) as response:
                        assert response.status == 200
                        answer = (await response.json())["choices"][0]["message"]
                    messages += [answer, {"role": "user", "content": f"still {number}"}]
                await gateway.close_session(session.key)

            await asyncio.gather(*map(play, range(200)))
            assert gateway.num_sessions == 0
        for number, chat in enumerate(chats):
            assert len(chat.answers) == 3
            assert not chat.strangers
            assert chat.answers[0]["content"] == f"0: I am {number}"

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_over_anthropics_api_comes_back_as_it_was_said(is_streamed):
    """Its first connection is cut; the client sends what its SDK would."""
    said = think_and_call('{"where":  "Zürich"}', "{}", content="two looks")
    chat = RecordingChat(say(said, {"role": "assistant", "content": "done"}))

    async def act(gateway, session):
        proxy = CuttingProxy(port_of(gateway), num_cuts=1)
        async with proxy.serve() as url, aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await ask(client, f"{url}/v1/messages", session.key, HELLO, 0)
            blocks = await ask(client, f"{url}/v1/messages", session.key, HELLO, 1)
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
                for block in blocks
                if block["type"] == "tool_use"
            ]
            turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
            last = await ask(client, f"{url}/v1/messages", session.key, [*HELLO, *turns], 0)
            assert [block.get("text") for block in last] == ["done"]

    async def ask(client, url, key, messages, num_retries):
        headers = {"x-api-key": key, "x-stainless-retry-count": str(num_retries)}
        body = {"model": "m", "max_tokens": 9, "messages": messages, "stream": is_streamed}
        async with client.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            if not is_streamed:
                return (await response.json())["content"]
            events = (await response.read()).decode().split("\n\n")
        data = [json.loads(event.partition("data: ")[2]) for event in events if event]
        return assembled(data)

    in_session(chat, act)
    assert len(chat.requests) == 2
    assert not chat.strangers
    assert chat.requests[1].messages[1] == said
