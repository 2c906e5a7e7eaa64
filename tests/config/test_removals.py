"""An option that a recipe sets is taken out again by ~key, and gets its default back."""

from pathlib import Path

import pytest

from mcore_rl.config.recipe import load_recipe

QWEN = "qwen3_30b_a3b_grpo_32"
CALCULATOR = "tiny_agent_calculator"


def test_an_option_gets_its_default_back() -> None:
    assert load_recipe(QWEN, []).parallel.dp == 8
    assert load_recipe(QWEN, ["~parallel.dp"]).parallel.dp is None
    assert load_recipe(QWEN, ["~eval.data", "run.steps=3"]).eval.data == []


def test_a_group_gets_its_defaults_back() -> None:
    config = load_recipe("tiny_moe_grpo", ["~train.optimizer", "train.mini_batches=2"])
    assert config.train.optimizer == type(config.train.optimizer)()
    assert config.train.mini_batches == 2


def test_a_key_with_a_free_name_is_gone() -> None:
    assert "reward" in load_recipe(CALCULATOR, []).agents.options
    assert "reward" not in load_recipe(CALCULATOR, ["~agents.options.reward"]).agents.options
    assert load_recipe(CALCULATOR, ["~agents.options"]).agents.options == {}


def test_a_choice_of_a_file_is_taken_back() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", ["~algorithm", "reward.path=x.py"])
    assert config.algorithm == type(config.algorithm)()


def test_a_base_recipe_of_ones_own_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [{QWEN}, _self_]\nparallel: {{tp: 4}}\n")
    assert load_recipe(str(mine), ["~parallel.dp"]).parallel.world_size == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["~parallel.dpp"], r"~parallel.dpp: the recipe has no such key. Did you mean 'parallel"),
        (
            ["~parallel.cp"],
            r"~parallel.cp: there is nothing .*\(parallel.cp=1\); leave",
        ),
        (["~sft"], r"~sft: there is nothing to take out, .* the default holds; leave it out"),
        (
            ["~parallel.dp", "parallel.dp=4"],
            "~parallel.dp takes out what parallel.dp=4 sets: ",
        ),
        (["~parallel", "parallel.tp=4"], "~parallel takes out what parallel.tp=4 sets: leave one"),
        (["~agents.options.x"], r"~agents.options.x: the recipe has no such key\."),
    ],
)
def test_what_cannot_be_taken_out_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(QWEN, overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm=kl_cov",
            r"algorithm=kl_cov: .* There are cispo, dapo, .*, vespo; .*\.loss=kl_cov or",
        ),
        (
            "cluster=h10",
            r"cluster=h10: .* Did you mean 'h100'\? There are gpu, h100, ",
        ),
    ],
)
def test_a_missing_choice_lists_what_there_is(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(QWEN, [override])


def test_a_missing_base_lists_recipes(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [qwen3_30b_grpo_32, _self_]\n")
    with pytest.raises(ValueError, match=rf"Did you mean '{QWEN}'\? There are .*, mine,"):
        load_recipe(str(mine), [])


def test_a_missing_group_lists_groups(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [schema, models: qwen3_30b_a3b, _self_]\n")
    with pytest.raises(ValueError, match=r"Nor is there a group 'models': there are algorithm, cl"):
        load_recipe(str(mine), [])
