"""Translation of chat completions; an echo equals the answer."""

import json

import pytest
from hypothesis import given

from mcore_rl.agents.gateway.api import BadRequestError, Memory
from mcore_rl.agents.gateway.chat_completions import ChatCompletions
from tests.support.gateway_answers import answers, events_of, exchange

API = ChatCompletions(chr)
HELLO = {"role": "user", "content": "hello"}


@given(answers())
def test_an_echo_equals_the_answer(message):
    _, body, memory = exchange(API, {"messages": [HELLO]}, message)
    echo = body["choices"][0]["message"]
    assert API.read({"messages": [HELLO, echo]}, memory).request.messages[1] == message


@given(answers())
def test_an_echo_of_a_client_that_parses_arguments_equals_the_answer(message):
    _, body, memory = exchange(API, {"messages": [HELLO]}, message)
    echo = body["choices"][0]["message"]
    for call in echo.get("tool_calls", ()):
        try:
            parsed = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        call["function"]["arguments"] = json.dumps(parsed, separators=(", ", ":"))
    found = API.read({"messages": [HELLO, echo]}, memory).request.messages[1]
    ours = [c["function"]["arguments"] for c in message.get("tool_calls", ())]
    theirs = [c["function"]["arguments"] for c in found.get("tool_calls", ())]
    for our, their in zip(ours, theirs, strict=True):
        assert their == our or not our.strip().startswith("{")


@given(answers())
def test_a_stream_says_what_the_answer_says(message):
    call, body, _ = exchange(API, {"messages": [HELLO]}, message)
    chunks = events_of(API, call, message)
    delta = chunks[0]["choices"][0]["delta"]
    for number, tool in enumerate(delta.get("tool_calls", ())):
        assert tool.pop("index") == number
    choice = body["choices"][0]
    assert delta == choice["message"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_messages_of_every_role_and_parts_of_text_are_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given_messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "c", "name": None},
        {"role": "assistant", "content": None, "reasoning": "why", "function_call": None},
        {"role": "tool", "tool_call_id": "x", "content": parts},
    ]
    assert API.read({"messages": given_messages}, Memory()).request.messages == (
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "why"},
        {"role": "tool", "tool_call_id": "x", "content": "ab"},
    )


def test_bounds_are_honored_and_tools_are_hidden_from_a_policy_that_may_not_call():
    tool = {"type": "function", "function": {"name": "look", "strict": True, "parameters": {}}}
    body = {"messages": [HELLO], "tools": [tool], "max_completion_tokens": 5, "stop": "END"}
    request = API.read(body, Memory()).request
    assert (request.max_tokens, request.stop) == (5, ("END",))
    assert request.tools == ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    assert API.read({**body, "tool_choice": "none"}, Memory()).request.tools == ()


def test_a_stream_ends_with_usage_and_token_ids_if_asked_to():
    body = {
        "messages": [HELLO],
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
    }
    message = {"role": "assistant", "content": "ü"}
    call, _, _ = exchange(API, body, message)
    first, last, usage = events_of(API, call, message)
    assert first["prompt_token_ids"] == [5, 6]
    assert last["choices"][0]["token_ids"] == [ord("ü")]
    assert last["choices"][0]["logprobs"]["content"] == [
        {"token": "ü", "logprob": -0.5, "bytes": [195, 188], "top_logprobs": []}
    ]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logit_bias", {"5": 1}),
        ("top_logprobs", 3),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "function", "content": "x"}]),
    ],
)
def test_unsupported_fields_are_refused_by_name(field, value):
    with pytest.raises(BadRequestError, match=field) as caught:
        API.read({"messages": [HELLO], field: value}, Memory())
    assert caught.value.error.code == "unsupported_parameter"
    assert API.error(caught.value.error)["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": ["hello"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [HELLO], "max_tokens": 0},
        {"messages": [HELLO], "max_tokens": True},
        {"messages": [HELLO], "stop": [""]},
        {"messages": [HELLO], "stop": ["a"] * 33},
        {"messages": [HELLO], "stop": "a" * 1025},
        {"messages": [HELLO], "stream": 1},
    ],
)
def test_malformed_bodies_are_refused(body):
    with pytest.raises(BadRequestError, match=r"messages|max_tokens|stop|stream"):
        API.read(body, Memory())


def test_parameters_without_effect_are_named():
    body = {"messages": [HELLO], "temperature": 0.1, "top_p": None, "user": "u", "bad\nname": 1}
    assert API.read(body, Memory()).ignored == ("temperature",)
