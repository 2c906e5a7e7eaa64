"""Checks of single fields, of a grammar's too; test_request_fields.py has the fields they bound."""

import pytest

from mcore_rl.rollout.request_fields import (
    FieldError,
    limit_number,
    limit_whole,
    refuse_grammars,
    show,
)


def test_a_number_is_no_boolean_and_no_infinity() -> None:
    check = limit_number(-2, 2)
    check("a", 1.5)
    for value in (True, float("nan"), float("inf"), 2.1):
        with pytest.raises(FieldError, match=r"^a=.*: -2 to 2, a number$"):
            check("a", value)


def test_a_whole_number_may_have_a_value_outside_its_range() -> None:
    check = limit_whole(1, 9, also=(-1,))
    check("a", -1)
    with pytest.raises(FieldError, match=r"^a=0: -1 or 1 to 9, a whole number$"):
        check("a", 0)


def test_a_long_value_is_shown_in_part() -> None:
    assert len(show("x" * 1000)) == 64


def test_a_constraint_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(FieldError, match=r"^regex='a\+' constrains .*--grammar-backend xgrammar"):
        refuse_grammars({"sampling_params": [{}, {"regex": "a+"}]})
    refuse_grammars({"tool_choice": "auto", "regex": None})
