"""Marks in an answer, by which its parts are found in a rendered conversation."""

import json
from collections.abc import Sequence
from typing import Any

from mcore_rl.agents.messages import Message

END_OF_REASONING = "</think>"


def unused_mark(messages: Sequence[Message]) -> str:
    """Return letters and digits that occur nowhere in the messages."""
    text = json.dumps([dict(message) for message in messages], default=str)
    number = 0
    while (mark := f"qX{number}mark") in text:
        number += 1
    return mark


def mark_answer(message: Message, mark: str) -> tuple[dict[str, Any], list[str]]:
    """Return the answer with a mark in each part that it has, and the marks.

    Parts are the reasoning, the content and the calls. The mark ends the reasoning and the content,
    and replaces a call's arguments. An answer without content and calls gets a mark as content.
    Reasoning that was left in the content, up to </think>, gets a mark of its own.
    """
    marked = dict(message)
    marks = []

    def put(name: str) -> str:
        marks.append(f"{mark}{name}z")
        return marks[-1]

    reasoning = marked.get("reasoning_content")
    content = marked.get("content") or ""
    calls = marked.get("tool_calls") or ()
    if reasoning and reasoning.strip():
        marked["reasoning_content"] = reasoning + put("reasoning")
    elif END_OF_REASONING in content:
        thought, _, rest = content.partition(END_OF_REASONING)
        if thought.replace("<think>", "").strip():
            thought += put("thought")
        content = thought + END_OF_REASONING + rest
    if content.strip() or not calls:
        marked["content"] = content + put("content")
    if calls:
        marked["tool_calls"] = [_mark_call(call, put(f"call{i}")) for i, call in enumerate(calls)]
    return marked, marks


def mark_content(message: Message, mark: str) -> tuple[dict[str, Any], list[str]]:
    """Return the answer with a mark in its content alone, and the mark."""
    return {**message, "content": (message.get("content") or "") + mark}, [mark]


def without_reasoning(message: Message, text_is_reasoning: bool = False) -> Message:
    """Return the message without the assistant's reasoning.

    `text_is_reasoning`: text beside a call is reasoning, too.
    """
    if message.get("role") != "assistant":
        return message
    if text_is_reasoning and message.get("tool_calls"):
        message = {**message, "content": ""}
    stripped = {key: value for key, value in message.items() if key != "reasoning_content"}
    content = stripped.get("content")
    if isinstance(content, str) and END_OF_REASONING in content:
        stripped["content"] = content.rpartition(END_OF_REASONING)[2]
    return stripped


def _mark_call(call: Any, mark: str) -> dict[str, Any]:
    function = {**call["function"], "arguments": json.dumps({"mark": mark})}
    return {**call, "function": function}
