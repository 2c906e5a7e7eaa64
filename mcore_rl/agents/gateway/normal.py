"""Brings chat messages into one form, so that a client's echo equals the answer it was given."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from mcore_rl.agents.gateway.api import BadRequestError
from mcore_rl.agents.messages import Message, Tool
from mcore_rl.process.server_keys import read_call_arguments

UNREADABLE = "unparsed_arguments"
"""Key of a tool call's arguments, where an object is needed and they are none."""


def make_assistant_message(
    content: str, reasoning: str = "", tool_calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return a message of the assistant; reasoning and calls are left out where there are none."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def make_tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def make_tool_message(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def make_function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> Tool:
    """Return a tool in OpenAI's chat format; what is None is left out."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def normalize_message(message: Message) -> dict[str, Any]:
    """Return the form in which two messages of an assistant are equal if they say the same.

    Missing, null and empty content, reasoning and calls are the same; other fields are dropped.
    """
    calls = [
        make_tool_call(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return make_assistant_message(
        message.get("content") or "", message.get("reasoning_content") or "", calls
    )


def parse_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object.

    What is no object of JSON is handed over whole, as the text under the key UNREADABLE.
    """
    if not arguments.strip():
        return {}
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: arguments}


def read_arguments(place: str, call_id: str, given: Any, known: Mapping[str, str]) -> str:
    """Return the text of a call's arguments in a client's history; none at all are `{}`.

    Templates read an object. Raises BadRequestError if the arguments are no object of JSON, and the
    policy did not write them, either.

    given, known   as exact_arguments takes them; `given` may also be None
    """
    if given is None or isinstance(given, str | dict):
        given = keep_exact_arguments(call_id, "" if given is None else given, known)
        if given == known.get(call_id):
            return given
    try:
        return read_call_arguments(given)
    except ValueError as error:
        raise BadRequestError(place, str(error)) from None


def keep_exact_arguments(call_id: str, given: Any, known: Mapping[str, str]) -> str:
    """Return the text of a call's arguments that the policy wrote, if `given` means the same.

    given   text, or an object of JSON; clients parse arguments and write them anew
    known   the texts that the policy wrote, by the call's id
    """
    written = known.get(call_id)
    if given == written:
        return given
    value = parse_arguments(given) if isinstance(given, str) else given
    if written is not None and parse_arguments(written) == value:
        return written
    return given if isinstance(given, str) else orjson.dumps(given).decode()
