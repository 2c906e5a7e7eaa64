"""Options by dotted names."""

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.tree import defaults_of, leaves_under, spell, value_of, with_settings


def test_names_lead_to_values() -> None:
    config = Config()
    for name in leaves_under(Config):
        assert value_of(config, name) == dict(defaults_of(Config, name))[name]


def test_a_group_has_the_defaults_of_the_place_where_it_stands() -> None:
    assert dict(defaults_of(Config, "critic.optimizer"))["critic.optimizer.lr"] == 1e-5
    assert dict(defaults_of(Config, "train"))["train.optimizer.lr"] == 1e-6


def test_settings_replace_options_and_are_checked_together() -> None:
    config = with_settings(
        Config(), {"rehearse": True, "parallel.pp": 2, "parallel.vpp": 2, "train.optimizer.lr": 1.0}
    )
    assert config.rehearse
    assert (config.parallel.pp, config.parallel.vpp, config.train.optimizer.lr) == (2, 2, 1.0)
    with pytest.raises(ValueError, match=r"^critic.parallel.vpp=2 with critic.parallel.pp=1: "):
        with_settings(Config(), {"critic.parallel.vpp": 2})


def test_values_are_shown_as_a_recipe_spells_them() -> None:
    assert [spell(value) for value in (None, True, "", "a", 1.5, [])] == [
        *("null", "true", "''", "a", "1.5", "[]")
    ]


def test_settings_that_are_right_only_together_are_replaced_at_once() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", [])
    with pytest.raises(ValueError, match=r"parallel\.world_size=8 trainer ranks"):
        with_settings(config, {"rollout.engines": 8})
    both = with_settings(config, {"parallel.dp": 2, "rollout.engines": 8})
    assert (both.parallel.world_size, both.rollout.engines) == (16, 8)
