"""How many processes a command has, and who shares GPUs with whom."""

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.bundles import RunSize


def test_only_a_command_that_trains_the_critic_makes_room_for_it() -> None:
    config = load_recipe("tiny_moe_ppo", ["critic.parallel.tp=2"])
    trained = RunSize.make(config, "train")
    tuned = RunSize.make(config, "sft")
    assert (trained.critic, tuned.critic) == (2, 0)
    assert trained.num_cpus(0.5) - tuned.num_cpus(0.5) == 1.5


def test_a_reward_model_on_the_trainers_gpus_takes_none_of_its_own() -> None:
    settings = ["judge.path=/a", "reward_model.path=/b", "reward_model.restarts=0"]
    colocated = load_recipe(
        "tiny_moe_grpo", [*settings, "reward_model.colocated=true", "cluster.offload=true"]
    )
    size = RunSize.make(colocated, "train")
    assert (list(size.colocated_served), size.tenants) == (["reward_model"], 2)
    assert size.num_cpus(0.5) == (2 + 1 + 1) * 0.5  # ranks, engine, judge
    without_trainer = RunSize.make(colocated, "eval")
    assert list(without_trainer.served) == ["judge", "reward_model"]
    assert not without_trainer.colocated_served
    for changed, message in (
        ("reward_model.restarts=1", "reward_model.colocated=true with reward_model.url='' and"),
        (
            "reward_model.tp=4",
            r"reward_model.engines \* reward_model.tp \* reward_model.pp = 4: there are",
        ),
        ("rollout.mode=one_step_off", "reward_model.colocated=true with rollout.mode=one_step_off"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe("tiny_moe_grpo", [*settings, "reward_model.colocated=true", changed])
