"""Translation of the Responses API; an echo equals the answer."""

import pytest
from hypothesis import given

from mcore_rl.agents.gateway.api import BadRequestError, Memory
from mcore_rl.agents.gateway.responses import Responses
from tests.support.gateway_answers import answered, answers, events_of, exchange

API = Responses()
HELLO = {"role": "user", "content": "hello"}


@given(answers())
def test_an_echo_equals_the_answer(message):
    _, body, memory = exchange(API, {"input": [HELLO]}, message)
    again = API.read({"input": [HELLO, *body["output"]]}, memory)
    assert again.request.messages[1:] == (message,)


@given(answers("first"), answers("second"))
def test_two_answers_in_a_row_stay_two_messages(first, second):
    _, one, memory = exchange(API, {"input": [HELLO]}, first)
    _, two, other = exchange(API, {"input": [HELLO]}, second)
    assert not set(memory.arguments) & set(other.arguments)
    written = Memory(arguments={**memory.arguments, **other.arguments})
    again = API.read({"input": [HELLO, *one["output"], HELLO, *two["output"]]}, written)
    assert again.request.messages[1::2] == (first, second)


@given(answers())
def test_an_echo_without_the_reasonings_text_equals_the_answer(message):
    """Clients that store nothing send back encrypted_content only."""
    body = {"input": [HELLO], "store": False, "include": ["reasoning.encrypted_content"]}
    _, answer, memory = exchange(API, body, message)
    assert not memory.responses
    for item in answer["output"]:
        if item["type"] == "reasoning":
            del item["content"]
    again = API.read({"input": [HELLO, *answer["output"]]}, memory)
    assert again.request.messages[1:] == (message,)


@given(answers())
def test_a_stream_carries_the_same_items(message):
    call, body, _ = exchange(API, {"input": "hello"}, message)
    events = events_of(API, call, message)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == body["output"]
    assert events[-1]["response"] == body
    texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(texts) == message["content"]


def test_the_previous_response_carries_the_conversation_but_no_instructions():
    body = {"input": "hello", "instructions": "be brief"}
    message = {"role": "assistant", "content": "hi", "reasoning_content": "greet"}
    _, answer, memory = exchange(API, body, message)
    nxt = {"input": "go on", "previous_response_id": answer["id"], "instructions": "be long"}
    assert API.read(nxt, memory).request.messages == (
        {"role": "system", "content": "be long"},
        HELLO,
        message,
        {"role": "user", "content": "go on"},
    )


def test_an_answer_that_was_cut_is_incomplete():
    call = API.read({"input": "x"}, Memory())
    given_answer = answered({"role": "assistant", "content": "x"})
    object.__setattr__(given_answer.completion, "finish_reason", "length")
    body = API.answer(call, given_answer)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert b"response.incomplete" in list(API.events(call, given_answer))[-1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("text", {"format": {"type": "json_schema"}}),
        ("tool_choice", {"type": "function", "name": "f"}),
        ("tools", [{"type": "web_search"}]),
    ],
)
def test_unsupported_fields_are_refused_by_name(field, value):
    with pytest.raises(BadRequestError, match=field):
        API.read({"input": "x", field: value}, Memory())


def test_an_unknown_previous_response_is_refused():
    with pytest.raises(BadRequestError, match="previous_response_id") as caught:
        API.read({"input": "x", "previous_response_id": "resp_0"}, Memory())
    error = API.error(caught.value.error)["error"]
    assert error["code"] == "previous_response_not_found"
    assert b"previous_response_not_found" in API.error_event(caught.value.error)
