"""Items of the Responses API become messages."""

import pytest
from hypothesis import given

from mcore_rl.agents.gateway.api import BadRequestError, Memory
from mcore_rl.agents.gateway.responses import read_input, read_tools, seal
from tests.support.gateway_answers import TEXTS


def test_items_of_one_response_become_one_message():
    call = {"type": "function_call", "name": "look", "arguments": "{}"}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {**call, "call_id": "a"},
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        {"type": "function_call_output", "call_id": "b", "output": "two"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {**call, "call_id": "c"},
    ]
    messages = read_input({"input": items}, Memory())
    roles = ["user", "assistant", "tool", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert messages[1]["reasoning_content"] == "why"
    assert messages[1]["content"] == "look"
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["a", "b"]
    assert (messages[4]["reasoning_content"], messages[4]["content"]) == ("r", "")


@given(TEXTS)
def test_sealed_reasoning_comes_back(text):
    item = {"type": "reasoning", "encrypted_content": seal(text)}
    (message,) = read_input({"input": [item]}, Memory())
    assert message.get("reasoning_content", "") == text


@pytest.mark.parametrize(
    "given_input",
    [
        None,
        [],
        3,
        [{"role": "robot", "content": "x"}],
        [{"type": "item_reference", "id": "x"}],
        [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}],
        [{"type": "reasoning", "encrypted_content": "mcore_rl.!"}],
        [{"role": "user", "content": [{"type": "input_image"}]}],
    ],
)
def test_other_input_is_refused(given_input):
    with pytest.raises(BadRequestError, match="input"):
        read_input({"input": given_input}, Memory())


def test_tools_of_other_types_are_refused_by_name():
    with pytest.raises(BadRequestError, match="local_shell"):
        read_tools([{"type": "local_shell"}])
