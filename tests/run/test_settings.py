"""A command's settings name one recipe; overrides change it."""

import pytest

from mcore_rl.run.settings import load_settings, read_recipe


def test_overrides_change_the_recipe() -> None:
    config, overrides = read_recipe(["run.steps=3", "recipe=tiny_moe_grpo"])
    assert (config.run.steps, overrides) == (3, ["run.steps=3"])


@pytest.mark.parametrize("settings", [[], ["recipe=tiny_moe_grpo", "recipe=tiny_moe_ppo"]])
def test_one_recipe_is_named(settings: list[str]) -> None:
    with pytest.raises(ValueError, match=r"give one recipe=<name>, got (0|2)"):
        read_recipe(settings)


def test_a_recipe_without_its_key_gets_it() -> None:
    with pytest.raises(
        ValueError, match="tiny_moe_grpo: recipes are named by recipe=tiny_moe_grpo"
    ):
        read_recipe(["tiny_moe_grpo", "run.steps=3"])


def test_a_command_for_other_nodes_fetches_nothing() -> None:
    path = "nobody/nothing"  # neither a folder nor on the hub
    config = load_settings(["recipe=tiny_moe_grpo", f"model.path={path}"], "submit")
    assert config.model.path == path
