"""The cluster group and the launch file for AMD's GPUs fit recipes; neither has run on one."""

import pytest
import yaml

from launch.kuberay import MANIFEST
from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from tests.support.launches import files_of


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b_grpo_8", "moonlight_16b_a3b_grpo_8"])
def test_recipes_fit_hosts_of_mi300x(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"recipe={recipe}", "cluster=mi300x"]) == 0
    assert "fits:" in capsys.readouterr().out


def test_nothing_of_it_is_for_nvidias_gpus_alone() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", ["cluster=mi300x"])
    assert config.rollout.sglang["attention_backend"] == "aiter"
    assert "use_precision_aware_optimizer" not in config.train.optimizer.megatron


def test_pods_ask_for_amds_gpus() -> None:
    words = ("recipe=qwen3_30b_a3b_grpo_8", "cluster=mi300x", "launch=kuberay_mi300x")
    mounted = ("run.dir=/mnt/a", "launch.image=i", "launch.claims={runs: /mnt}")
    [_, job] = yaml.safe_load_all(files_of(*words, *mounted)[MANIFEST])
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    [container] = head["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["amd.com/gpu"] == "8"
    assert head["rayStartParams"]["num-gpus"] == "8"
    assert "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES" in str(container["env"])
