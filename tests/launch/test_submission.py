"""The nodes of a job come from its recipe; too few are refused with both numbers."""

from pathlib import Path

import pytest

from launch.options import KubeRayOptions, LocalOptions, SlurmOptions
from launch.submission import find_needs, make_submission
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.bundles import NodeNeeds, RunSize

JOINED = "cluster.address=auto"


def needs_of(recipe: str, *settings: str, **options: int) -> NodeNeeds:
    config = load_recipe(recipe, [*settings, JOINED])
    size = RunSize.make(config, "train")
    slurm = SlurmOptions(**options)  # pyright: ignore
    return find_needs(size, config.rollout, config.cluster, config.plan, slurm)


def test_a_recipe_says_how_many_nodes_it_needs() -> None:
    assert needs_of("kimi_k2_grpo_256_128") == NodeNeeds(48, 0, 8, 64)
    apart = needs_of("kimi_k2_grpo_256_128", "cluster.separate_nodes=true")
    assert (apart.nodes, apart.trainer_nodes, apart.engine_nodes) == (48, 32, 16)
    given = needs_of("qwen3_30b_a3b_grpo_8", nodes=2, cpus_per_node=96)
    assert given == NodeNeeds(2, 0, 8, 96)


def test_too_few_or_too_small_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"launch.nodes=4, but the recipe needs 48 nodes of 8 GPU"):
        needs_of("kimi_k2_grpo_256_128", nodes=4)
    with pytest.raises(ValueError, match="a process needs 64 CPUs and 8 GPUs of one node, which"):
        needs_of("kimi_k2_grpo_256_128", cpus_per_node=32)


@pytest.mark.parametrize("kind", [SlurmOptions, KubeRayOptions])
def test_a_run_has_the_grace_that_its_job_gives(kind: type[SlurmOptions | KubeRayOptions]) -> None:
    options = kind(save_before_end_s=90)
    needs, folder = NodeNeeds(1, 0, 0, 2), Path("/runs/a")
    made = make_submission("train", ["recipe=a"], folder, needs, options)
    assert made.arguments == ["train", "recipe=a", "run.grace_s=90", "run.dir=/runs/a"]
    chosen = make_submission("train", ["run.grace_s=60"], folder, needs, options)
    assert chosen.arguments == ["train", "run.grace_s=60", "run.dir=/runs/a"]


def test_arguments_name_the_folder_of_the_run_once() -> None:
    words = ["recipe=tiny_moe_grpo", "run.dir=/runs/a", "run.steps=3"]
    options = LocalOptions(gpus_per_node=0, cpus_per_node=2)
    made = make_submission("sft", words, Path("/runs/a"), NodeNeeds(1, 0, 0, 2), options)
    assert made.arguments == ["sft", "recipe=tiny_moe_grpo", "run.steps=3", "run.dir=/runs/a"]
    assert (made.name, str(made.folder)) == ("sft-a", "/runs/a/launch")
