"""verl's programs that sample ahead of the trainer, as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.tools.translate.hydra import OWN_CONFIGS, read_options
from mcore_rl.tools.translate.translation import ForeignOptions, Translation
from mcore_rl.tools.translate.verl import translate_verl
from tests.tools.translate.accounts import decided, values

FULLY = {
    "data.train_batch_size": 0,
    "data.gen_batch_size": 1,
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "trainer.n_gpus_per_node": 6,
    "rollout.nnodes": 2,
    "rollout.n_gpus_per_node": 2,
    "rollout.total_rollout_steps": 1024,
    "async_training.require_batches": 2,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.staleness_threshold": 0.5,
}
"""Options of the fully asynchronous program; a step has 32 * 2 * 4 prompts."""
MODES = {"fully_async": "async", "one_step_off": "one_step_off"} | dict.fromkeys(
    ("ppo_trainer", "ppo_megatron_trainer"), "sync"
)
"""Beginnings of the names of verl's configurations, and rollout.mode of their recipes."""


def ahead(config: str = "", /, **given: Any) -> Translation:
    """Translate FULLY, or options of the configuration `config`; names have "__" for "."."""
    options = {name.replace("__", "."): value for name, value in given.items()}
    whole = options if config else FULLY | options
    return translate_verl(ForeignOptions(whole, is_whole=False, config_name=config))


def test_a_step_has_the_prompts_between_two_weight_syncs() -> None:
    found = values(ahead())
    assert found["rollout.prompts_per_step"] == 256 and found["train.mini_batches"] == 8
    assert found["run.steps"] == 4, "prompts of a run by those of a step"
    assert values(ahead(trainer__total_training_steps=7))["run.steps"] == 7
    assert "run.epochs" not in found
    reasons = {item.source: item.reason for item in ahead(trainer__total_epochs=3).unneeded}
    assert reasons["trainer.total_epochs"] == "a number of steps ends the run"


def test_engines_have_gpus_of_their_own() -> None:
    translation = ahead()
    found = values(translation)
    assert found["rollout.engines"] == 4 and "cluster.colocated" not in found
    assert "actor_rollout_ref.hybrid_engine" not in decided(translation)
    one_step_off = ahead("one_step_off_ppo_trainer", rollout__n_gpus_per_node=2)
    assert values(one_step_off)["rollout.engines"] == 1


def test_samples_are_as_old_as_they_may_be_there() -> None:
    translation = ahead()
    found = values(translation)
    assert found["rollout.mode"] == "async" and found["rollout.partial"] == "continue"
    assert found["rollout.max_staleness"] == 1
    assert "async_training.staleness_threshold" in decided(translation)
    whole = ahead(async_training__staleness_threshold=2, async_training__partial_rollout=False)
    assert values(whole)["rollout.max_staleness"] == 2
    assert values(whole)["rollout.partial"] == "wait"
    assert "async_training.staleness_threshold" not in decided(whole)
    in_turns = values(ahead(async_training__staleness_threshold=0))
    assert in_turns["rollout.mode"] == "sync" and "rollout.max_staleness" not in in_turns
    lends = "async_training.use_dynamic_resource_scheduling"
    assert lends in decided(ahead(**{lends: True}))


@pytest.mark.parametrize("config", sorted(OWN_CONFIGS))
def test_engines_log_probs_are_the_old_ones_where_sampling_is_ahead(config: str) -> None:
    found = values(ahead(config, data__train_batch_size=64))
    mode = MODES[config.partition("_ppo")[0]]
    assert found.get("rollout.mode", "sync") == mode
    assert found.get("algorithm.correction.bypass", False) == (mode != "sync")
    own = ahead(config, algorithm__rollout_correction__bypass_mode=False)
    assert "algorithm.correction.bypass" not in values(own)


def test_the_program_says_which_configuration_is_its_own() -> None:
    program = "verl.experimental.fully_async_policy.fully_async_main"
    options = read_options(["-m", program, "rollout.nnodes=2"])
    assert options.config_name == "fully_async_ppo_trainer"
    named = "--config-name=fully_async_ppo_megatron_trainer.yaml"
    assert read_options(["-m", program, "--config-path=config", named, "a=b"]).given == {"a": "b"}
    assert read_options(["-m", "verl.trainer.main_ppo", "a=b"]).config_name == ""
    by_default = translate_verl(read_options(["-m", program, "data.train_batch_size=0"]))
    assert values(by_default)["rollout.prompts_per_step"] == 256 * 4


@pytest.mark.parametrize("config", sorted(OWN_CONFIGS))
def test_memory_is_freed_for_engines_on_the_trainers_gpus_only(config: str) -> None:
    group = "megatron" if "megatron" in config else "fsdp_config"
    name = f"actor_rollout_ref.actor.{group}.param_offload"
    translation = ahead(config, **{name: True})
    is_shared = config.startswith("ppo")
    assert values(translation).get("cluster.offload", False) == is_shared
    assert (name in decided(translation)) != is_shared
