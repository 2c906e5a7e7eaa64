"""The needs that a recipe states: folder, models, memory, GPUs; the offset of a node's clock."""

from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.clock import (
    ClockOffset,
    TimeSample,
    judge_offset,
    measure_offset,
)
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


def test_the_quickest_round_trip_counts() -> None:
    slow, quick = TimeSample(0.0, 50.0, 8.0), TimeSample(10.0, 40.5, 10.2)
    offset = measure_offset([slow, quick])
    assert offset.seconds == pytest.approx(30.4)
    assert offset.uncertainty_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("seconds", "uncertainty_s", "outcome"),
    [
        (0.9, 0.0, "ok"),
        (-1.5, 0.0, "warning"),
        (1.5, 1.0, "ok"),
        (31.0, 0.1, "failed"),
        (-31.0, 2.0, "warning"),
        (-45.0, 2.0, "failed"),
    ],
)
def test_the_least_that_the_skew_can_be_decides(
    seconds: float, uncertainty_s: float, outcome: str
) -> None:
    finding = judge_offset(ClockOffset(seconds, uncertainty_s), "b", "a")
    assert finding.outcome == outcome
    assert f"{seconds:+.3f} s beside a" in finding.text
