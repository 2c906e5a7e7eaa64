"""Translation of Anthropic's messages; an echo equals the answer."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from mcore_rl.agents.gateway.anthropic_messages import AnthropicMessages
from mcore_rl.agents.gateway.api import BadRequestError, Memory
from tests.support.gateway_answers import answered, answers, assembled, events_of, exchange

API = AnthropicMessages()
HELLO = {"role": "user", "content": "hello"}


@given(answers())
def test_an_echo_equals_the_answer(message):
    _, body, memory = exchange(API, {"messages": [HELLO]}, message)
    echo = {"role": "assistant", "content": body["content"]}
    assert API.read({"messages": [HELLO, echo]}, memory).request.messages[1] == message


@given(answers())
def test_an_echo_of_what_a_stream_built_equals_the_answer(message):
    call, body, memory = exchange(API, {"messages": [HELLO]}, message)
    blocks = assembled(events_of(API, call, message))
    assert blocks == body["content"]
    echo = {"role": "assistant", "content": blocks}
    assert API.read({"messages": [HELLO, echo]}, memory).request.messages[1] == message


def test_the_stream_carries_the_arguments_as_the_policy_wrote_them():
    written = '{"b":  1, "a": "ü"}'
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": written}}],
    }
    call, _, _ = exchange(API, {"messages": [HELLO]}, message)
    deltas = [event.get("delta", {}) for event in events_of(API, call, message)]
    assert written in [delta.get("partial_json") for delta in deltas]


@pytest.mark.parametrize(
    ("finish_reason", "stop_text", "told"),
    [
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", "", ("end_turn", None)),
        ("tool_calls", "END", ("tool_use", None)),
        ("length", "", ("max_tokens", None)),
    ],
)
def test_an_answer_tells_what_ended_it(finish_reason, stop_text, told):
    call = API.read({"messages": [HELLO], "stop_sequences": ["END"]}, Memory())
    given = answered({"role": "assistant", "content": "so"})
    answer = replace(given.completion.answer, stop_text=stop_text)
    completion = replace(given.completion, answer=answer, finish_reason=finish_reason)
    given = replace(given, completion=completion)
    stream = b"".join(API.events(call, given)).decode()
    ending = json.loads(stream.partition("event: message_delta\ndata: ")[2].partition("\n")[0])
    for body in (API.answer(call, given), ending["delta"]):
        assert (body["stop_reason"], body["stop_sequence"]) == told


def test_tool_results_become_messages_of_tools_in_their_order():
    body = {
        "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "one"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "content": [{"type": "text", "text": "two"}],
                    },
                    {"type": "tool_result", "tool_use_id": "c"},
                    {"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": " on"},
                ],
            }
        ],
    }
    assert API.read(body, Memory()).request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "go on"},
    )


def test_arguments_of_a_call_that_is_not_ours_are_written_as_json():
    block = {"type": "tool_use", "id": "x", "name": "look", "input": {"a": "ü"}}
    body = {"messages": [HELLO, {"role": "assistant", "content": [block]}]}
    (_, message) = API.read(body, Memory()).request.messages
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":"ü"}'


def test_bounds_tools_and_ignored_parameters():
    body = {
        "messages": [HELLO],
        "max_tokens": 7,
        "stop_sequences": ["END"],
        "temperature": 1.0,
        "thinking": {"type": "enabled", "budget_tokens": 99},
        "tools": [{"name": "look", "description": "see", "input_schema": {"type": "object"}}],
    }
    call = API.read(body, Memory())
    assert (call.request.max_tokens, call.request.stop) == (7, ("END",))
    assert call.ignored == ("temperature", "thinking")
    function = {"name": "look", "description": "see", "parameters": {"type": "object"}}
    assert call.request.tools == ({"type": "function", "function": function},)
    none = API.read({**body, "tool_choice": {"type": "none"}}, Memory())
    assert none.request.tools == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", {"type": "any"}),
        ("mcp_servers", [{"name": "x"}]),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]),
        ("messages", [{"role": "robot", "content": "x"}]),
    ],
)
def test_unsupported_fields_are_refused_by_name(field, value):
    with pytest.raises(BadRequestError, match=field) as caught:
        API.read({"messages": [HELLO], field: value}, Memory())
    assert API.error(caught.value.error)["error"]["type"] == "invalid_request_error"
