"""Finds the fields of a request that only an engine with a grammar can honor."""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.rollout.field_checks import FieldError, show

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_FREE_CHOICES = ("auto", "none")


def refuse_grammars(body: Mapping[str, Any]) -> None:
    """Raise FieldError if a body of any API constrains what the model may write."""
    for name, value in _constraints(body):
        raise FieldError(
            f"{name}={show(value)} constrains the answer by a grammar, and this server samples"
            " without one: start it by `mcore-rl serve --grammar-backend xgrammar`, or ask for the"
            " format in the prompt"
        )


def _constraints(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field that needs a grammar."""
    if _is_format(body.get("response_format")):
        yield "response_format", body["response_format"]
    for name in ("text", "output_config"):  # OpenAI's Responses, Anthropic's Messages
        nested = body.get(name)
        if isinstance(nested, dict) and _is_format(nested.get("format")):
            yield f"{name}.format", nested["format"]
    if _is_forced(body.get("tool_choice")):
        yield "tool_choice", body["tool_choice"]
    tools = body.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and _is_strict(tool):
            yield f"tools[{number}].strict", True
    given = body.get("sampling_params")
    for fields in (body, *(given if isinstance(given, list) else [given])):
        for name in GRAMMARS:
            if isinstance(fields, dict) and fields.get(name):
                yield name, fields[name]


def _is_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") not in (None, "text")


def _is_forced(choice: Any) -> bool:
    """Return whether a tool must be called: "required", a tool's name, or "any" of Anthropic's."""
    if isinstance(choice, dict):
        return choice.get("type") not in _FREE_CHOICES
    return isinstance(choice, str) and choice not in _FREE_CHOICES


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return tool.get("strict") is True or (
        isinstance(function, dict) and function.get("strict") is True
    )
