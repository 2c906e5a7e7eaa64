"""Makes the histories that clients send such that every chat template can render them.

body of a chat --> empty arguments of calls are `{}` --> SGLang
               --> other arguments that are no object, or an end with the assistant: refused

SGLang answers empty arguments with 400, renders missing ones as null, and hands a last message of
the assistant to the model as one of the user.
"""

from collections.abc import Iterator
from typing import Any

from mcore_rl.process.json_body import read_call_arguments
from mcore_rl.rollout.field_checks import FieldError

_HISTORIES = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
"""Path -> the field with the conversation."""
_CONTINUES = ("continue_final_message", "add_generation_prompt")
"""Options of SGLang by which a client asks to go on with the assistant's message."""


def mend_history(path: str, body: dict[str, Any]) -> bool:
    """Make empty arguments of tool calls in `body` `{}`, and return whether there were any.

    Raises FieldError for other arguments that are no object, and if the assistant said the last.
    What is no conversation at all is left to SGLang.
    """
    name = _HISTORIES.get(path)
    history = body.get(name) if name else None
    if not isinstance(history, list) or not history:
        return False
    was_mended = False
    for place, holder in _calls(f"{name}", history):
        given = holder.get("arguments")
        if not isinstance(given, dict):
            holder["arguments"] = _read(place, given)
            was_mended |= holder["arguments"] != given
    last = history[-1]
    is_answer = isinstance(last, dict) and last.get("role") == "assistant"
    if is_answer and not any(body.get(option) is not None for option in _CONTINUES):
        raise FieldError(
            f"{name}: the last message must not be the assistant's: nothing asks for more"
        )
    return was_mended


def _calls(name: str, history: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each call's arguments, and the object that holds them."""
    for number, item in enumerate(history):
        if not isinstance(item, dict):
            continue
        if item.get("type") == "function_call":
            yield f"{name}[{number}].arguments", item
        calls = item.get("tool_calls")
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield f"{name}[{number}].tool_calls[{index}].function.arguments", function


def _read(place: str, given: object) -> str:
    try:
        return read_call_arguments(given)
    except ValueError as error:
        raise FieldError(f"{place}: {error}") from None
