"""Fields of request bodies; wrong ones are named."""

import pytest

from mcore_rl.agents.gateway.api import (
    BadRequestError,
    join_text,
    list_ignored_names,
    read_max_tokens,
    read_optional,
    read_required,
    refuse,
    stop_texts,
)


def test_a_field_of_another_type_is_named_with_its_place():
    with pytest.raises(BadRequestError, match=r"tools\[0\]\.name: must be a string, not 3"):
        read_optional({"name": 3}, "name", str, "tools[0].")
    with pytest.raises(BadRequestError, match="messages: is missing") as caught:
        read_required({"messages": None}, "messages", list)
    assert caught.value.error.code == "missing_required_parameter"


def test_the_first_bound_counts_and_a_boolean_is_none():
    assert read_max_tokens({"b": 3, "a": None}, "a", "b") == 3
    assert read_max_tokens({}, "a") is None
    with pytest.raises(BadRequestError, match="a: must be an integer"):
        read_max_tokens({"a": True}, "a")


@pytest.mark.parametrize(("value", "texts"), [(None, ()), ("x", ("x",)), (["x", "y"], ("x", "y"))])
def test_stop_texts(value, texts):
    assert stop_texts({"stop": value}, "stop") == texts


def test_only_fields_with_a_value_are_refused():
    refuse({"n": None, "bias": {}, "background": False}, {"n": "", "bias": "", "background": ""})
    with pytest.raises(BadRequestError, match=r"bias: .*; leave it out"):
        refuse({"bias": {"1": 2}}, {"bias": "leave it out"})


def test_names_without_effect_fit_into_a_header():
    body = {f"p{number:03d}": 1 for number in range(99)} | {"a b": 1, "x" * 65: 1, "known": 1}
    names = list_ignored_names(body, frozenset({"known"}))
    assert names == tuple(f"p{number:03d}" for number in range(32))


def test_parts_that_are_no_text_are_named():
    with pytest.raises(BadRequestError, match=r"content\[1\]\.type=image"):
        join_text(
            [{"type": "text", "text": "a"}, {"type": "image"}], "content", frozenset({"text"})
        )
