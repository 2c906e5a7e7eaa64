"""Histories of clients at an engine are read as the gateway reads them."""

from typing import Any

import pytest

from mcore_rl.rollout.request_fields import FieldError
from mcore_rl.rollout.request_gates import mend_history

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GO = {"role": "user", "content": "go"}
DONE = {"role": "assistant", "content": "done"}


def history(**function: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", **function}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [GO, answer, {"role": "tool", "tool_call_id": "c", "content": "seen"}]}


def items(arguments: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "seen"}
    return {"input": [GO, call, output]}


@pytest.mark.parametrize(
    "function", [{"arguments": ""}, {"arguments": " \n"}, {}, {"arguments": None}]
)
def test_empty_arguments_are_an_empty_object(function: dict[str, Any]) -> None:
    body = history(**function)
    assert mend_history(CHAT, body) and body == history(arguments="{}")
    body = items(function.get("arguments"))
    assert mend_history(RESPONSES, body) and body == items("{}")


@pytest.mark.parametrize("arguments", ['{"x": 1}', " {}", {"x": 1}, {}])
def test_objects_stay_as_they_are(arguments: Any) -> None:
    body = history(arguments=arguments)
    assert not mend_history(CHAT, body) and body == history(arguments=arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("[1]", r"must be an object of JSON, as templates want, not '\[1\]'"),
        ("null", r"must be an object of JSON, as templates want, not 'null'"),
        ("not json", r"must be an object of JSON, but 'not json' is no JSON: "),
        (7, "must be a string of JSON, not int"),
        (False, "must be a string of JSON, not bool"),
        ([], "must be a string of JSON, not list"),
    ],
)
def test_other_arguments_are_refused_with_their_place(arguments: Any, reason: str) -> None:
    place = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"
    with pytest.raises(FieldError, match=f"^{place}: {reason}"):
        mend_history(CHAT, history(arguments=arguments))
    with pytest.raises(FieldError, match=rf"^input\[1\]\.arguments: {reason}"):
        mend_history(RESPONSES, items(arguments))


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")]
)
def test_a_conversation_that_ends_with_the_assistant_is_refused(path: str, name: str) -> None:
    with pytest.raises(FieldError, match=f"^{name}: the last message must not be the assistant's"):
        mend_history(path, {name: [GO, DONE]})
    assert not mend_history(path, {name: [GO, DONE, GO]})


@pytest.mark.parametrize("option", ["continue_final_message", "add_generation_prompt"])
def test_a_client_may_ask_to_go_on_with_its_last_message(option: str) -> None:
    assert not mend_history(CHAT, {"messages": [GO, DONE], option: True})


@pytest.mark.parametrize(
    "messages", [None, 3, {}, [], ["text"], [[DONE]], [{"tool_calls": 3}], [{"tool_calls": [3]}]]
)
def test_what_is_no_conversation_is_left_to_sglang(messages: Any) -> None:
    assert not mend_history(CHAT, {"messages": messages})
    assert not mend_history("/generate", {"messages": [DONE]})
