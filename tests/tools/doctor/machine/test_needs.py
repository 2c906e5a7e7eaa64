"""The needs that a recipe states: folder, models, memory, GPUs."""

from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.needs import NamedModel, read_recipe


def test_a_recipe_gives_folder_models_memory_and_gpus() -> None:
    needs = read_recipe(
        ["recipe=tiny_moe_grpo", "run.dir=/r", "model.path=/m", "cluster.object_store_mib=300"]
    )
    assert needs.run_dir == Path("/r")
    assert needs.models == (NamedModel("model.path", "/m"),)
    assert needs.object_store_mib == 300
    assert needs.gpus == 3  # a trainer rank and two engines


def test_ppo_reads_a_critic_and_ranks_for_it() -> None:
    with_critic = read_recipe(["recipe=tiny_moe_ppo", "model.path=/m", "critic.path=/c"])
    assert NamedModel("critic.path", "/c") in with_critic.models
    assert with_critic.gpus == read_recipe(["recipe=tiny_moe_grpo", "model.path=/m"]).gpus + 1


def test_a_ray_that_is_joined_needs_no_memory_here_and_random_weights_no_files() -> None:
    needs = read_recipe(
        ["recipe=tiny_moe_grpo", "cluster.address=h:6379", "model.path=/m", "model.init=random"]
    )
    assert needs.object_store_mib == 0
    assert needs.models == (NamedModel("model.path", "/m", with_weights=False),)


@pytest.mark.parametrize("settings", [["run.dir=/r"], ["recipe=a", "recipe=b"]])
def test_settings_without_one_recipe_are_refused(settings: list[str]) -> None:
    with pytest.raises(ValueError, match="give one recipe=<name>"):
        read_recipe(settings)
