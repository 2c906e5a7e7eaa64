"""Functions by name: found with their needs; unknown and taken names are refused."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.algo.registry import Needs, Registry

FLAGS = [field.name for field in fields(Needs) if field.name != "held_back"]
NEEDS = st.builds(Needs, **{name: st.booleans() for name in FLAGS})


def double(value: int) -> int:
    return 2 * value


def make_registry() -> Registry:
    registry: Registry = Registry("algorithm.kind")
    registry.register("double", Needs(critic=True))(double)
    registry.register("other")(lambda value: value)
    return registry


def test_an_option_that_other_choices_read_is_unread() -> None:
    registry: Registry = Registry("algorithm.kind")
    registry.register("first", reads=("a", "b"))(double)
    registry.register("second", reads=("b",))(double)
    registry.register("third", reads=())(double)
    registry.register("unknown")(double)
    assert registry.unread_by("first") == {}
    assert registry.unread_by("second") == {"a": ["first"]}
    assert registry.unread_by("third") == {"a": ["first"], "b": ["first", "second"]}
    assert registry.unread_by("unknown") == {}


def test_a_registered_function_is_found_with_its_needs() -> None:
    registry = make_registry()
    assert registry["double"] is double and registry["double"](2) == 4
    assert registry.needs("double") == Needs(critic=True) and registry.needs("other") == Needs()
    assert registry.names == ["double", "other"]


def test_unknown_names_are_refused_with_the_nearest() -> None:
    message = (
        r"^algorithm.kind='doubel' \(did you mean 'double'\?\): expected one of 'double', 'other'$"
    )
    for ask in (make_registry().__getitem__, make_registry().needs):
        with pytest.raises(ValueError, match=message):
            ask("doubel")


def test_a_taken_name_is_refused_and_the_first_function_stays() -> None:
    registry = make_registry()
    with pytest.raises(ValueError, match=r"algorithm.kind='double' is registered already, by .*:"):
        registry.register("double")(lambda value: value)
    assert registry["double"] is double


def test_registrations_can_be_undone() -> None:
    registry = make_registry()
    registry.keep_only(["other"])
    assert registry.names == ["other"]


@given(NEEDS, NEEDS)
def test_joined_needs_hold_those_of_both(first: Needs, second: Needs) -> None:
    joined = first.join(second)
    for name in FLAGS:
        assert getattr(joined, name) == (getattr(first, name) or getattr(second, name))
    assert first.join(first) == first and first.join(Needs()) == first


def test_a_pick_of_tokens_is_kept_when_needs_are_joined() -> None:
    picking = Needs(held_back=lambda covariance_R, options, seed: torch.zeros(0))
    assert Needs(critic=True).join(picking).held_back is picking.held_back
    assert picking.join(Needs()).held_back is picking.held_back


def test_what_a_function_sees_is_kept_or_refused() -> None:
    registry = make_registry()
    registry.register("apart", sees="groups", normalized=True)(double)
    entry = registry.entry("apart")
    assert (entry.sees, entry.normalized) == ("groups", True)
    assert (registry.entry("other").sees, registry.entry("other").normalized) == ("step", False)
    sees: Any = "group"
    with pytest.raises(ValueError, match=r"kind='new': sees='group', expected one of \('samples',"):
        registry.register("new", sees=sees)
    with pytest.raises(ValueError, match=r"kind='new': normalized=True with sees='samples': no"):
        registry.register("new", sees="samples", normalized=True)
