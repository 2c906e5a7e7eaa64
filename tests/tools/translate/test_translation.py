"""Each option that was given is in a line, a decision, or unneeded with a reason."""

from collections.abc import Iterator

import pytest

from mcore_rl.tools.translate.translation import (
    AS_HERE,
    IS_OFF,
    Decision,
    ForeignOptions,
    RecipeLine,
    account,
)
from tests.tools.translate.accounts import decided, told, values


def test_options_that_nobody_took_have_a_reason_or_are_decided_on() -> None:
    options = ForeignOptions(
        {"taken": 1, "idle": 2, "odd": 3}, False, "", {"idle2": "$x", "run": "$y"}
    )

    def found() -> Iterator[RecipeLine | Decision]:
        yield RecipeLine("run.steps", options.take("taken", 0), ("taken",))

    reasons = {"idle": "not needed", "idle2": "not needed either"}
    translation = account(options, found(), reasons.get)
    assert values(translation) == {"run.steps": 1}
    assert {item.source: item.reason for item in translation.unneeded} == reasons
    assert decided(translation) == {"odd", "run"}
    assert told(translation) == {"taken", "idle", "odd", "idle2", "run"}


def test_what_is_so_anyway_is_told_too() -> None:
    options = ForeignOptions({"kind": "adam", "switch": False, "other": None}, is_whole=False)
    options.take("kind", "adam")
    options.take("switch", False)
    unneeded = account(options, iter(()), {}.get).unneeded
    told = {item.source: item.reason for item in unneeded}
    assert told == {"kind": AS_HERE, "switch": AS_HERE, "other": IS_OFF}


def test_a_refused_line_does_not_take_others_along() -> None:
    lines = [
        RecipeLine("train.megatron.moe_flex_dispatcher_backend", "deepep", ("deepep",)),
        RecipeLine("train.megatron.moe_token_dispatcher_type", "allgather", ("dispatcher",)),
        RecipeLine("train.megatron.apply_rope_fusion", True, ("rope",)),
    ]
    translation = account(ForeignOptions({}, False), iter(lines), {}.get)
    assert decided(translation) == {"deepep", "dispatcher"}
    assert values(translation) == {"train.megatron.apply_rope_fusion": True}


def test_a_line_may_need_another() -> None:
    lines = [
        RecipeLine("train.megatron.moe_flex_dispatcher_backend", "deepep", ("deepep",)),
        RecipeLine("train.megatron.moe_token_dispatcher_type", "flex", ("dispatcher",)),
    ]
    translation = account(ForeignOptions({}, False), iter(lines), {}.get)
    assert len(values(translation)) == 2 and not translation.decisions


@pytest.mark.parametrize(
    ("value", "default", "message"),
    [
        ("", 1, "n='' is not a number; if the script takes it from a variable, set that"),
        ("None", 0.5, "n='None' is not a number"),
        ("", False, "n='' is not true or false"),
    ],
)
def test_a_text_in_the_place_of_a_number_is_named(value: str, default: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForeignOptions({"n": value}, False).take("n", default)
    assert ForeignOptions({"n": None}, False).take("n", default) == default
    assert ForeignOptions({"n": value}, False).take("n", None) == value
