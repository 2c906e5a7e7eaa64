"""Type hints and docstrings become the JSON schema of a tool."""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal

import pytest

from mcore_rl.agents.environments.tools_env import describe_tool
from tests.agents.environments import toolbox


class Color(Enum):
    RED = "red"


def test_a_function_is_described_by_its_signature_and_docstring():
    assert describe_tool(toolbox.add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers, exactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "first": {"type": "integer", "description": "one of them, the first"},
                    "second": {"type": "integer", "description": "the other"},
                },
                "required": ["first"],
            },
        },
    }


def test_hidden_parameters_are_not_the_policys():
    properties = describe_tool(toolbox.wait)["function"]["parameters"]["properties"]
    assert properties == {"seconds": {"type": "number"}}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list, {"type": "array"}),
        (Mapping[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (dict, {"type": "object"}),
        (Literal["a", 2], {"enum": ["a", 2]}),
        (Color, {"enum": ["red"]}),
        (str | None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
    ],
)
def test_hints_become_schemas(hint, schema):
    def tool(value):
        return value

    tool.__annotations__ = {"value": hint}
    found = describe_tool(tool)["function"]["parameters"]["properties"]["value"]
    assert found == schema


def test_what_has_no_schema_is_named():
    def many(*values: int) -> None: ...

    def odd(value: object) -> None: ...

    with pytest.raises(ValueError, match="tool untyped: parameter value needs a type hint"):
        describe_tool(toolbox.untyped)
    with pytest.raises(ValueError, match=r"tool many: \*values has no schema"):
        describe_tool(many)
    with pytest.raises(ValueError, match=r"tool odd, parameter value: .* has no JSON schema"):
        describe_tool(odd)
