"""Every number and every enumeration has bounds, which hold wherever an option comes from."""

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

from mcore_rl.config import Config, ParallelConfig, RolloutConfig
from mcore_rl.config.bounds import (
    Bounds,
    Choices,
    Options,
    Range,
    bounded,
    check_bounds,
    is_group,
    one_of,
    options_of,
)
from mcore_rl.config.recipe import load_recipe, make_config
from mcore_rl.run.inputs import open_policy

UNBOUNDED = {
    "eval.correct_at",
    "reward.judge.low",
    "reward.judge.high",
    "reward.error_value",
    "algorithm.covariance.low",
    "algorithm.covariance.high",
    "algorithm.entropy_coef",
}
"""Numbers of either sign and any size."""
REGISTERED = {
    "algorithm.advantage": "grpo",
    "algorithm.loss": "ppo_clip",
    "algorithm.aggregation": "token_mean",
    "algorithm.preference.loss": "dpo",
}
"""Options that name a registered function, and one such name."""
FREE_TEXTS = {
    *("path", "dir", "cache_dir", "spill_dir", "template", "model_tokenizer", "revision"),  # files
    "index",  # a folder
    "calibration",  # a folder
    *("url", "url_model", "api_key_env", "address", "mlflow_uri", "wandb_project"),  # servers
    *(
        "name",
        "correct_part",
        "role_part",
        "verdict",
        "column",
    ),  # what the user's functions, judges, files say
    *("environment", "python", "tool_parser", "reasoning_parser"),  # checked before a run
    "recompute",  # modules, which tests/config/test_training.py checks
}
"""Last parts of the names of options that take any text."""


def options(cls: type = Config, prefix: str = "") -> dict[str, tuple[Any, Bounds | None]]:
    found: dict[str, tuple[Any, Bounds | None]] = {}
    for name, (kind, bounds) in options_of(cls).items():
        if is_group(kind):
            found |= options(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = (kind, bounds)
    return found


OPTIONS = options()
RANGES = {name: b for name, (_, b) in OPTIONS.items() if isinstance(b, Range)}
CHOICES = {name: b for name, (_, b) in OPTIONS.items() if isinstance(b, Choices)}


def is_int(name: str) -> bool:
    kind = OPTIONS[name][0]
    return kind is int or int in get_args(kind)


def outside(name: str) -> list[float]:
    """Values just outside the bounds of an option."""
    bounds = RANGES[name]
    step = 1 if is_int(name) else 1e-3
    values = []
    if bounds.least is not None:
        values.append(bounds.least - step)
    if bounds.above is not None:
        values.append(bounds.above)
    if bounds.most is not None:
        values.append(bounds.most + step)
    if bounds.below is not None:
        values.append(bounds.below)
    return [value for value in values if value != bounds.also]


def inside(name: str) -> list[float]:
    """Values at the bounds of an option and just inside of them."""
    bounds = RANGES[name]
    step = 1 if is_int(name) else 1e-3
    values = []
    if bounds.least is not None:
        values += [bounds.least, bounds.least + step]
    if bounds.above is not None:
        values.append(bounds.above + step)
    if bounds.most is not None:
        values += [bounds.most, bounds.most - step]
    if bounds.below is not None:
        values.append(bounds.below - step)
    if bounds.also is not None:
        values.append(bounds.also)
    return values


VALUES = asdict(Config())


def refusal(name: str, value: object) -> str:
    """The error for a recipe in which the option has the value; empty if its bounds allow it."""
    *groups, option = name.split(".")
    values = VALUES
    for group in groups:
        values = values[group]
    before = values[option]
    values[option] = value
    try:
        check_bounds(Config, VALUES)
    except ValueError as error:
        return str(error)
    finally:
        values[option] = before
    return ""


def test_every_number_has_bounds_or_is_known_to_have_none() -> None:
    numbers = {
        name
        for name, (kind, _) in OPTIONS.items()
        if {int, float} & {kind, *get_args(kind)} and kind is not bool and not _is_container(kind)
    }
    assert len(numbers) > 100
    assert numbers - RANGES.keys() == UNBOUNDED


def _is_container(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) in (list, dict)


@pytest.mark.parametrize("name", RANGES)
def test_a_number_outside_its_bounds_is_refused_by_its_full_name(name: str) -> None:
    for value in outside(name):
        assert refusal(name, value) == f"{name}={value}: {RANGES[name]}"


@pytest.mark.parametrize("name", RANGES)
def test_a_number_within_its_bounds_is_not_refused_for_them(name: str) -> None:
    for value in inside(name):
        assert not refusal(name, value)


def test_every_text_is_an_enumeration_a_registered_name_or_free() -> None:
    texts = {
        name
        for name, (kind, _) in OPTIONS.items()
        if str in {kind, *get_args(kind)} and not _is_container(kind)
    }
    assert len(texts) > 40
    rest = texts - CHOICES.keys() - REGISTERED.keys()
    assert {name for name in rest if name.rpartition(".")[2] not in FREE_TEXTS} == set()


@pytest.mark.parametrize("name", REGISTERED)
def test_a_name_that_nobody_registered_is_refused_for_every_command(name: str) -> None:
    config = load_recipe("tiny_moe_grpo", [f"{name}=nonsense"])
    expected = f"{name}='nonsense'.*: expected one of .*{REGISTERED[name]!r}"
    with pytest.raises(ValueError, match=expected):
        open_policy(replace(config, run=replace(config.run, dir="/never/made")))


@pytest.mark.parametrize("name", CHOICES)
def test_a_value_that_is_none_of_the_choices_is_refused(name: str) -> None:
    assert refusal(name, "nonsense") == f"{name}='nonsense': {CHOICES[name]}"
    for value in CHOICES[name].values:
        assert not refusal(name, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_is_nan_or_infinite(value: float) -> None:
    for name, (kind, _) in OPTIONS.items():
        if float in {kind, *get_args(kind)} and not _is_container(kind):
            assert refusal(name, value) == f"{name}={value}: must be finite"
    assert refusal("reward.weights", [math.nan]) == "reward.weights=[nan]: must be finite"


def test_load_recipe_refuses_whatever_lies_outside_of_bounds() -> None:
    """Through the YAML tree, in which values are converted to the types of their fields first."""
    tree = OmegaConf.structured(Config)
    for name in RANGES:
        value = outside(name)[0]
        before = OmegaConf.select(tree, name)
        OmegaConf.update(tree, name, value)
        with pytest.raises(ValueError, match=f"^{re.escape(name)}=.*: must ") as refused:
            make_config(tree)
        assert str(RANGES[name]) in str(refused.value)
        OmegaConf.update(tree, name, before)


@pytest.mark.parametrize(
    "setting", ["critic.parallel.tp=0", "parallel.dp=0", "rollout.top_p=1.5", "train.epochs=0"]
)
def test_bounds_come_before_what_divides_by_a_size(setting: str) -> None:
    with pytest.raises(ValueError, match=f"recipe tiny_moe_grpo: {setting}: must "):
        load_recipe("tiny_moe_grpo", [setting])


def test_a_class_made_in_python_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"^rollout.top_p=1.5: must lie in \(0, 1\]$"):
        RolloutConfig(top_p=1.5)
    with pytest.raises(ValueError, match=r"^ParallelConfig.tp=0: must be at least 1$"):
        ParallelConfig(tp=0)


@dataclass
class Inner(Options):
    size: int | None = bounded(None, least=1)
    kind: str = one_of("a", ("a", "b"))


@dataclass
class Outer(Options):
    share: float = bounded(0.5, least=0, below=1)
    limit: float = bounded(0.0, above=1, also=0)
    most: float = bounded(0.0, most=2)
    below: float = bounded(0.0, below=2)


def test_bounds_say_what_they_allow() -> None:
    texts = {name: str(bounds) for name, (_, bounds) in options_of(Outer).items()}
    assert texts == {
        "share": "must lie in [0, 1)",
        "limit": "must be greater than 1, or be 0",
        "most": "must be at most 2",
        "below": "must be less than 2",
    }


def test_a_group_is_named_where_it_stands() -> None:
    assert Inner(size=None, kind="b").size is None
    with pytest.raises(ValueError, match=r"^a.b.size=0: must be at least 1$"):
        check_bounds(Inner, {"size": 0, "kind": "a"}, "a.b")
    with pytest.raises(ValueError, match=r"^Inner.kind='c': expected one of 'a', 'b'$"):
        Inner(kind="c")
