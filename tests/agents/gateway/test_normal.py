"""The normal form of messages and arguments."""

import pytest
from hypothesis import given

from mcore_rl.agents.gateway.normal import (
    UNREADABLE,
    keep_exact_arguments,
    normalize_message,
    parse_arguments,
)
from tests.support.gateway_answers import ARGUMENTS, answers


@given(answers())
def test_a_normal_message_stays_as_it_is(message):
    assert normalize_message(message) == message
    noisy = {"refusal": None, "reasoning_content": None, "tool_calls": [], **message}
    assert normalize_message(noisy) == message


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ("[1]", {UNREADABLE: "[1]"}),
        ("{", {UNREADABLE: "{"}),
        ('{"a": NaN}', {UNREADABLE: '{"a": NaN}'}),
    ],
)
def test_arguments_as_an_object(arguments, value):
    assert parse_arguments(arguments) == value


@given(ARGUMENTS)
def test_the_policys_own_text_is_found_again(arguments):
    known = {"c": arguments}
    assert keep_exact_arguments("c", parse_arguments(arguments), known) == arguments
    assert keep_exact_arguments("c", arguments, known) == arguments


def test_arguments_that_a_client_changed_are_taken_as_they_come():
    assert keep_exact_arguments("c", '{"a": 2}', {"c": '{"a": 1}'}) == '{"a": 2}'
    assert keep_exact_arguments("c", {"a": 2}, {"c": '{"a": 1}'}) == '{"a":2}'
    assert keep_exact_arguments("d", '{"a":1}', {"c": '{"a": 1}'}) == '{"a":1}'
