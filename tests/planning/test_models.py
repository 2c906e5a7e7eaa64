"""The models of a recipe are read once, and errors name the option that points to them."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import Config, ModelConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.recipe_models import PlannedRun, read_critic, read_policy

QWEN = "recipes/model/qwen3_30b_a3b"


def test_a_critic_without_a_path_starts_from_the_policy() -> None:
    config = load_recipe("tiny_moe_ppo", [f"model.path={QWEN}"])
    assert needs_of(config.algorithm).critic
    models = PlannedRun.make(config).models
    assert models.critic is models.policy
    assert models.policy.path == Path(QWEN)


def test_a_critic_of_its_own_is_read_from_its_path() -> None:
    path = "recipes/model/deepseek_v3"
    config = load_recipe("tiny_moe_ppo", [f"model.path={QWEN}", f"critic.path={path}"])
    critic = PlannedRun.make(config).models.critic
    assert critic is not None
    assert critic.architecture == "DeepseekV3ForCausalLM"


def test_a_recipe_without_a_critic_reads_the_policy_alone(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(path=QWEN))
    config = replace(config, critic=replace(config.critic, path=str(tmp_path)))
    assert PlannedRun.make(config).models.critic is None


def test_errors_name_the_option(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"^model.path=.*config.json does not exist"):
        read_policy(config.model.path)
    config = Config(model=ModelConfig(path=QWEN))
    policy = read_policy(config.model.path)
    config = replace(config, critic=replace(config.critic, path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"^critic.path=.*config.json does not exist"):
        read_critic(config.critic.path, policy)
