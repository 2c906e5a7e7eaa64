"""Kinds are known, their options are read, and a user's own class is an environment."""

import pytest

from mcore_rl.agents.environments.adapters import ADAPTERS, check_options, is_program, load
from mcore_rl.agents.environments.gymnasium_env import GymnasiumEnvironment, GymnasiumOptions
from tests.agents.environments import episodes
from tests.agents.environments.episodes import Countdown

COUNTDOWN = f"{episodes.HERE}:Countdown"


def test_every_kind_has_its_class_and_options():
    for kind in ADAPTERS:
        make, make_options = load(kind)
        verbs = ["run"] if is_program(kind) else ["reset", "step", "close"]
        assert all(callable(getattr(make, verb)) for verb in verbs), kind
        assert make_options.__module__ == make.__module__
    assert load("gymnasium") == (GymnasiumEnvironment, GymnasiumOptions)


def test_a_users_class_takes_its_options_as_keywords():
    make, make_options = load(COUNTDOWN)
    made = make(make_options(turns=5))
    assert type(made).__name__ == Countdown.__name__ and made.left == 5


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("gymnasum", {}, "no environment of kind 'gymnasum': it is one of gymnasium, "),
        ("gymnasium", {"id": "x", "seeed": 1}, "does not read the options seeed: it reads id, "),
        ("gymnasium", {}, "needs the options id"),
        ("gymnasium", {"id": "x", "max_steps": -1}, "max_steps -1"),
        (COUNTDOWN, {"turn": 1}, "does not read the options turn: it reads turns"),
        ("json:JSONDecoder", {}, "is no environment: it has no reset, step, close"),
    ],
)
def test_wrong_kinds_and_options_are_named(kind, options, text):
    with pytest.raises(ValueError, match=text):
        check_options(kind, options)


def test_the_options_of_a_users_class_are_good_if_it_reads_them():
    check_options(COUNTDOWN, {"turns": 2})
    check_options(COUNTDOWN, {})
