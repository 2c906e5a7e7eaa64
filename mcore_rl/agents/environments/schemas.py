"""Describes Python functions as tools: a JSON schema from type hints and docstring."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_rl.agents.environments.environment import Tool

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(
    r"^\s*(args|arguments|parameters|returns|raises|yields|examples?):?\s*$", re.I
)
_ENTRY = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return the tool that a function is, in OpenAI's format.

    Parameters that begin with an underscore are not the policy's. The docstring's words before its
    first section describe the tool, its section Args the parameters; so does Annotated[int, "a
    count"]. Raises ValueError if a
    parameter has no type hint, or one that JSON has no form for.
    """
    name = getattr(function, "__name__", type(function).__name__)
    hints = typing.get_type_hints(function, include_extras=True)
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name.startswith("_"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {name}: *{parameter.name} has no schema; name each parameter")
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name} needs a type hint")
        schema = _schema(hints[parameter.name], f"tool {name}, parameter {parameter.name}")
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": summary,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin is typing.Annotated:
        texts = [note for note in arguments[1:] if isinstance(note, str)]
        return _schema(arguments[0], where) | ({"description": texts[0]} if texts else {})
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument, where) for argument in arguments]}
    if (origin or hint) in (list, set, tuple, Sequence):
        items = [argument for argument in arguments if argument is not Ellipsis]
        return {"type": "array"} | ({"items": _schema(items[0], where)} if items else {})
    if (origin or hint) in (dict, Mapping):
        values = {"additionalProperties": _schema(arguments[1], where)} if arguments else {}
        return {"type": "object"} | values
    raise ValueError(
        f"{where}: {hint} has no JSON schema; use str, int, float, bool, list, dict, Literal or an "
        "Enum"
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the words before the first section, and what the section Args says by parameter."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, last = found.group(1).lower(), ""
        elif not section:
            summary.append(line.strip())
        elif section in ("args", "arguments", "parameters"):
            if entry := _ENTRY.match(line):
                last = entry.group(1)
                described[last] = entry.group(2).strip()
            elif last and line.strip():
                described[last] += f" {line.strip()}"
    return " ".join(part for part in summary if part), described
