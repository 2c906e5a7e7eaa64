"""All options are listed with their bounds, defaults, meanings and recipes, and can be searched."""

import json
from collections.abc import Mapping
from functools import cache

import pytest

from mcore_rl.cli import main
from mcore_rl.config import Config
from mcore_rl.config.recipe import list_recipes, load_recipe
from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.config.tree import leaves_under, value_of
from mcore_rl.tools.options import Option, list_options, read_settings
from tests.support.recipes import LARGE, LARGE_BY_LANE


@cache
def find_options() -> Mapping[str, Option]:
    """Return all options by name: tests that run elsewhere need none of them."""
    return {option.name: option for option in list_options()}


ELEMENTS = {
    *(f"data.sources[].{name}" for name in ("path", "weight")),
    *(f"data.curriculum.stages[].{name}" for name in ("after", "least", "most")),
    *(f"eval.sets[].{name}" for name in ("name", "path", "model")),
    *(
        f"train.lora.adapters[].{name}"
        for name in ("name", "data", "eval", "rank", "alpha", "path")
    ),
}

COMPLETED = {"model.path", "data.sources", "data.curriculum.stages", "eval.sets"}
"""Options whose values are made whole when they are read."""


def test_every_leaf_is_listed_with_a_description() -> None:
    assert find_options().keys() == {*leaves_under(Config), *ELEMENTS}
    assert not (
        bare := [name for name, option in find_options().items() if not option.description]
    ), f"write what these options mean under their fields in mcore_rl/config/: {bare}"


def test_an_option_has_type_bounds_and_default() -> None:
    def told(name: str) -> tuple[str, str]:
        return find_options()[name].takes, find_options()[name].default

    assert told("rollout.top_p") == ("float, in (0, 1]", "1.0")
    assert told("algorithm.dual_clip") == ("float, greater than 1, or be 0", "0.0")
    assert told("parallel.vpp") == ("int | null, at least 2", "null")
    assert told("run.resume") == ("one of true, false, newest_whole", "true")
    assert told("algorithm.correction.weight")[0].endswith("geometric, or null")
    assert told("reward.parts") == ("list of text", "[]")
    assert told("critic.optimizer.lr") == ("float, greater than 0", "1e-05")
    assert told("rollout.max_concurrency")[1] != told("judge.max_concurrency")[1]
    assert find_options()["rollout.max_concurrency"].description == "Requests in flight per engine."


@pytest.mark.parametrize(
    "recipe", [*LARGE_BY_LANE, *(name for name in list_recipes() if name not in LARGE)]
)
def test_a_recipe_is_told_with_the_values_that_it_composes_to(recipe: str) -> None:
    config = load_recipe(recipe, [])
    for name, value in read_settings(RECIPES_DIR / f"{recipe}.yaml").items():
        if name not in COMPLETED and "${" not in str(value):
            assert value_of(config, name) == value, f"{name}={value}"


def test_an_option_names_the_recipes_that_set_it() -> None:
    assert find_options()["algorithm.gae_lambda"].recipes["tiny_moe_ppo"] == "0.95"
    assert "tiny_moe_grpo" not in find_options()["critic.optimizer.lr"].recipes


def search(capsys: pytest.CaptureFixture[str], *words: str) -> list[Option]:
    assert main(["options", *words, "--json"]) == 0
    return [Option(**found) for found in json.loads(capsys.readouterr().out)]


def test_words_are_searched_in_names_and_texts(capsys: pytest.CaptureFixture[str]) -> None:
    found = {option.name for option in search(capsys, "kl")}
    assert {"algorithm.kl.coef", "algorithm.covariance.kl_coef", "algorithm.max_ratio"} <= found
    assert len(found) < 20
    assert {option.name for option in search(capsys, "KL", "horizon")} == {"algorithm.kl.horizon"}
    assert len(search(capsys)) == len(find_options())
    assert main(["options", "horizon"]) == 0
    assert capsys.readouterr().out.startswith("algorithm.kl.horizon = 10000  (int, at least 1)\n  ")
    assert main(["options", "temprature"]) == 2
    assert "Did you mean 'temperature'?" in capsys.readouterr().err
