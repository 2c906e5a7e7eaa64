"""Recipes: what they compose to, and how a wrong key, type or value is refused."""

from pathlib import Path

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import leaves, list_recipes, load_recipe, require


def test_every_shipped_recipe_composes_and_has_a_headline() -> None:
    recipes = list_recipes()
    assert "tiny_moe_grpo" in recipes
    for name, headline in recipes.items():
        assert isinstance(load_recipe(name, []), Config)
        assert headline, f"{name}.yaml should begin with a comment that says what it is"


def test_overrides_reach_the_tree() -> None:
    config = load_recipe(
        "tiny_moe_grpo",
        ["parallel.pp=2", "train.optimizer.lr=3e-4", "data.train=[a.jsonl,b.jsonl]"],
    )
    assert config.parallel.pp == 2
    assert config.train.optimizer.lr == 3e-4
    assert config.data.train == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tq=2"], r"unknown key 'parallel.tq'. Did you mean 'parallel.tp'"),
        (["tp=2"], r"unknown key 'tp'. Did you mean 'parallel.tp'"),
        (["rollot.tp=2"], r"unknown key 'rollot'. Did you mean 'rollout'"),
        (["+extra=1"], r"unknown key 'extra'"),
        (
            ["parallel.tp=two"],
            r"parallel.tp: Value 'two' of type 'str' could not be converted to Integer",
        ),
        (["model.dtype=fp8"], r"model.dtype='fp8': expected one of 'float32', 'bfloat16'"),
        (
            ["rollout.tp=3", "rollout.ep=2"],
            r"recipe tiny_moe_grpo: rollout.ep=2 does not divide rollout.tp=3",
        ),
        (
            ["train.freeze_router=true"],
            r"train.router_aux_loss_coef=0.001: a frozen router learns no balance",
        ),
        (["run.steps"], r"overrides have the form key=value"),
    ],
)
def test_wrong_overrides_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny_moe_grpo", overrides)


def test_unknown_key_inside_a_recipe_file_is_refused(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\ndefaults: [schema, _self_]\nrollout:\n  temprature: 0.5\n")
    with pytest.raises(
        ValueError, match=r"unknown key 'rollout.temprature'. Did you mean 'rollout.temperature'"
    ):
        load_recipe(str(path), [])


def test_a_recipe_of_ones_own_changes_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [qwen3_30b_a3b_grpo_8, _self_]\nrollout: {max_response_len: 4096}\n")
    config = load_recipe(str(path), ["algorithm=dapo"])
    assert config.rollout.max_response_len == 4096
    assert config.parallel.ep == 8
    assert config.rollout.dynamic_sampling


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'tiny_moe_grpo'"):
        load_recipe("tiny_moe_grp", [])


def test_require_names_the_missing_key() -> None:
    with pytest.raises(ValueError, match=r"reward.path is not set.*reward.path=<value>"):
        require(Config(), "reward.path")


def test_leaves_are_dotted_names_of_options() -> None:
    assert {"run.dir", "train.optimizer.lr", "algorithm.kl.coef", "sft.optimizer.lr"} <= set(
        leaves()
    )
