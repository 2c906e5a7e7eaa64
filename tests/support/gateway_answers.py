"""Answers of a policy at random, and what a gateway's API makes of them."""

import json
from typing import Any

from hypothesis import strategies as st

from mcore_rl.agents.gateway.api import Answered, Api, Call, Memory
from mcore_rl.agents.gateway.normal import make_assistant_message, make_tool_call
from mcore_rl.agents.messages import Message
from tests.support.episode_chats import completion_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.one_of(
    st.dictionaries(TEXTS, JSON_VALUES, max_size=3).flatmap(
        lambda value: st.sampled_from(
            [
                json.dumps(value),
                json.dumps(value, ensure_ascii=False, indent=1),
                json.dumps(value, separators=(",", ":")),
            ]
        )
    ),
    st.sampled_from(["", "{}", " { }", "[1]", "3", "{broken", '{"a": 1, "a": 2}']),
)


@st.composite
def answers(draw: st.DrawFn, ids: str = "call") -> Message:
    """Draw a message of the assistant: text, reasoning and parallel calls, each maybe empty."""
    arguments = draw(st.lists(ARGUMENTS, max_size=3))
    name = draw(st.sampled_from(["look", "search_ü"]))
    calls = [make_tool_call(f"{ids}_{i}", name, text) for i, text in enumerate(arguments)]
    return make_assistant_message(draw(TEXTS), draw(TEXTS), calls)


def answered(message: Message) -> Answered:
    return Answered("abc", 1_700_000_000, completion_of(message))


def exchange(api: Api, body: dict[str, Any], message: Message) -> tuple[Call, Any, Memory]:
    """Return the call of a body, the API's answer with `message`, as a client parses it, and the
    memory of the session.
    """
    memory = Memory()
    call = api.read(body, memory)
    given = answered(message)
    api.remember(call, given, memory)
    return call, json.loads(json.dumps(api.answer(call, given))), memory


def events_of(api: Api, call: Call, message: Message) -> list[dict[str, Any]]:
    """Return the data of the events of a stream, [DONE] left out."""
    stream = b"".join(api.events(call, answered(message))).decode()
    blocks = [block for block in stream.split("\n\n") if block]
    data = [block.rpartition("data: ")[2] for block in blocks]
    return [json.loads(text) for text in data if text != "[DONE]"]


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that Anthropic's clients put together from the events of a stream."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "partial": ""})
        if event["type"] == "content_block_delta":
            delta = {key: text for key, text in event["delta"].items() if key != "type"}
            ((key, text),) = delta.items()
            name = "partial" if key == "partial_json" else key
            blocks[event["index"]][name] += text
    for block in blocks:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    return blocks
