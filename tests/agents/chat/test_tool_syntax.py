"""Texts of calls are found, and failures explained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.chat.tool_syntax import (
    SYNTAXES,
    Written,
    describe_arguments_error,
    explain,
    find_written,
    is_malformed,
)
from mcore_rl.agents.messages import CallStatus
from tests.support.tool_calls import GOOD

QWEN = SYNTAXES["qwen25"]


@given(
    parser=st.sampled_from(sorted(set(GOOD) - {"mistral"})),
    gaps=st.lists(st.text("ab <\n", max_size=5), min_size=1, max_size=4),
)
def test_calls_are_found_between_texts(parser: str, gaps: list[str]) -> None:
    _, _, call = GOOD[parser]
    text = gaps[0]
    spans = []
    for gap in gaps[1:]:
        spans.append((len(text), len(text) + len(call)))
        text += call + gap
    found = find_written(SYNTAXES[parser], text)
    assert [(one.start, one.stop) for one in found] == spans
    assert all(one.closed and one.text == call for one in found)
    after_first = find_written(SYNTAXES[parser], text, spans[0][1] if spans else 0)
    assert [(one.start, one.stop) for one in after_first] == spans[1:]


def test_a_call_without_an_end_takes_the_rest() -> None:
    assert find_written(QWEN, "a<tool_call>b") == [Written(1, 13, "<tool_call>b", closed=False)]


@pytest.mark.parametrize(
    ("body", "malformed"),
    [
        ('{"name": "look"}', False),
        ('[{"name": "look"}, {"name": "go"}]', False),
        ("no json", False),
        ("5", True),
        ("[5]", True),
        ('{"name": 5}', True),
    ],
)
def test_malformed_json(body: str, malformed: bool) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert is_malformed(QWEN, Written(0, len(text), text, closed=True)) == malformed


@pytest.mark.parametrize(
    ("body", "closed", "status", "words"),
    [
        ("{", False, CallStatus.UNCLOSED, "does not end with </tool_call>"),
        ('{"name": "fly"}', True, CallStatus.UNKNOWN_TOOL, "There is no tool fly; the tools are: "),
        ('{"name": "look", }', True, CallStatus.BAD_JSON, "not valid JSON: "),
        ("5", True, CallStatus.BAD_JSON, "does not have the form <tool_call>"),
    ],
)
def test_failures_are_explained(body: str, closed: bool, status: CallStatus, words: str) -> None:
    text = f"<tool_call>\n{body}\n" + ("</tool_call>" if closed else "")
    found, _, error = explain(QWEN, Written(0, len(text), text, closed), ["look"])
    assert found is status
    assert words in error


def test_arguments_are_a_json_object() -> None:
    assert describe_arguments_error('{"x": 1}') == ""
    assert describe_arguments_error("[1]") == "The arguments are not a JSON object."
    assert describe_arguments_error("{").startswith("The arguments are not valid JSON: ")
