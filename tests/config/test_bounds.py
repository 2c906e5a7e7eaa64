"""Every number and every enumeration has bounds, which hold wherever an option comes from."""

import math
import re
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from omegaconf import OmegaConf

from mcore_rl.config import Config, ImagesConfig, ParallelConfig, RolloutConfig
from mcore_rl.config.bounds import (
    Bounds,
    Choices,
    Options,
    Range,
    bounded,
    check_bounds,
    is_group,
    options_of,
)
from mcore_rl.config.recipe import load_recipe, make_config

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
    "algorithm.advantage",
    "algorithm.loss",
    "algorithm.aggregation",
    "algorithm.preference.loss",
}
"""Options that name a registered function (tests/checks/test_algorithm.py)."""
FREE_TEXTS = {
    *("path", "dir", "cache_dir", "spill_dir", "template", "model_tokenizer", "revision"),  # files
    *("index", "calibration"),  # folders
    *("url", "url_model", "api_key_env", "address", "mlflow_uri", "wandb_project"),  # servers
    *("name", "correct_part", "role_part", "verdict", "column"),  # of functions, judges, files
    *(
        "trackio_project",
        "swanlab_project",
        "clearml_project",
        "entity",
        "group",
        "webhook",
        "prometheus_host",
    ),
    *("prompt", "answer", "images", "videos", "data_source", "extra_info", "system"),  # of columns
    *("best_metric", "hub_repo"),  # checked before a run
    *("environment", "python", "tool_parser", "reasoning_parser"),  # checked before a run
    "recompute",  # modules, which tests/config/test_training.py checks
}
"""Last parts of the names of options that take any text."""
NOT_FINITE = (math.nan, math.inf, -math.inf)


def options(cls: type = Config, prefix: str = "") -> dict[str, tuple[set[Any], Bounds | None]]:
    """Return the types and the bounds of all leaves, by name."""
    found: dict[str, tuple[set[Any], Bounds | None]] = {}
    for name, (kind, bounds) in options_of(cls).items():
        if is_group(kind):
            found |= options(kind, f"{prefix}{name}.")
        else:
            is_union = get_origin(kind) in (Union, UnionType)
            found[prefix + name] = (set(get_args(kind)) if is_union else {kind}, bounds)
    return found


OPTIONS = options()
RANGES = {name: b for name, (_, b) in OPTIONS.items() if isinstance(b, Range)}
CHOICES = {name: b for name, (_, b) in OPTIONS.items() if isinstance(b, Choices)}


def values_around(name: str) -> tuple[list[float], list[float]]:
    """Return the values at and just inside the bounds of an option, and those just outside."""
    bounds = RANGES[name]
    step = 1 if int in OPTIONS[name][0] else 1e-3
    inside: list[float] = []
    outside: list[float] = []
    if bounds.ge is not None:
        inside += [bounds.ge, bounds.ge + step]
        outside.append(bounds.ge - step)
    if bounds.gt is not None:
        inside.append(bounds.gt + step)
        outside.append(bounds.gt)
    if bounds.le is not None:
        inside += [bounds.le, bounds.le - step]
        outside.append(bounds.le + step)
    if bounds.lt is not None:
        inside.append(bounds.lt - step)
        outside.append(bounds.lt)
    if bounds.also is not None:
        inside.append(bounds.also)
    return inside, [value for value in outside if value != bounds.also]


VALUES = asdict(Config())


def refusal(name: str, value: object) -> str:
    """Return the error for a tree in which the option has the value; empty if it is allowed."""
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


def test_every_number_has_bounds_and_every_text_is_an_enumeration_registered_or_free() -> None:
    numbers = {name for name, (kinds, _) in OPTIONS.items() if kinds & {int, float}}
    assert len(numbers) > 100
    assert numbers - RANGES.keys() == UNBOUNDED
    texts = {name for name, (kinds, _) in OPTIONS.items() if str in kinds}
    assert len(texts) > 40
    rest = texts - CHOICES.keys() - REGISTERED
    assert {name for name in rest if name.rpartition(".")[2] not in FREE_TEXTS} == set()


def test_every_leaf_takes_what_its_bounds_allow_and_is_named_where_it_refuses_the_rest() -> None:
    """In plain values, and in the YAML tree, which converts values to their fields' types first."""
    tree = OmegaConf.structured(Config)
    for name, bounds in RANGES.items():
        inside, outside = values_around(name)
        for value in inside:
            assert refusal(name, value) == "", f"{name}={value} lies within its bounds"
        for value in outside:
            assert refusal(name, value) == f"{name}={value}: {bounds}"
        before = OmegaConf.select(tree, name)
        OmegaConf.update(tree, name, outside[0])
        with pytest.raises(ValueError, match=f"^{re.escape(name)}=.*: {re.escape(str(bounds))}$"):
            make_config(tree)
        OmegaConf.update(tree, name, before)
    for name, bounds in CHOICES.items():
        assert refusal(name, "nonsense") == f"{name}='nonsense': {bounds}"
        for value in bounds.values:
            assert refusal(name, value) == "", f"{name}={value} is one of its choices"
    for name in (name for name, (kinds, _) in OPTIONS.items() if float in kinds):
        for value in NOT_FINITE:
            assert refusal(name, value) == f"{name}={value}: must be finite"
    assert refusal("reward.weights", [math.nan]) == "reward.weights=[nan]: must be finite"


@dataclass
class Inner(Options):
    size: int | None = bounded(None, ge=1)
    kind: Literal["a", "b"] = "a"
    either: bool | Literal["c"] = True


@dataclass
class Outer(Options):
    share: float = bounded(0.5, ge=0, lt=1)
    limit: float = bounded(0.0, gt=1, also=0)
    le: float = bounded(0.0, le=2)
    lt: float = bounded(0.0, lt=2)


def test_bounds_say_what_they_allow_and_of_which_option() -> None:
    texts = {name: str(bounds) for name, (_, bounds) in options_of(Outer).items()}
    assert texts == {
        "share": "must lie in [0, 1)",
        "limit": "must be greater than 1, or be 0",
        "le": "must be at most 2",
        "lt": "must be less than 2",
    }
    assert options_of(Inner)["either"] == (bool | str, Choices((True, False, "c")))
    made = Inner(size=None, kind="b", either="c")
    assert (made.size, made.kind, made.either) == (None, "b", "c")
    wrong: dict[str, Any] = {"kind": "c"}
    refused = [
        (lambda: check_bounds(Inner, {"size": 0}, "a.b"), "a.b.size=0: must be at least 1"),
        (lambda: Inner(**wrong), "Inner.kind='c': expected one of 'a', 'b'"),
        (lambda: RolloutConfig(top_p=1.5), "rollout.top_p=1.5: must lie in (0, 1]"),
        (lambda: ParallelConfig(tp=0), "ParallelConfig.tp=0: must be at least 1"),
        (lambda: ImagesConfig(max_mib=0), "data.images.max_mib=0: must be at least 1"),
    ]
    for make, message in refused:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            make()
    # Bounds come before what divides by a size.
    for setting in ("critic.parallel.tp=0", "parallel.dp=0", "train.epochs=0"):
        with pytest.raises(ValueError, match=f"recipe tiny_moe_grpo: {setting}: must "):
            load_recipe("tiny_moe_grpo", [setting])
