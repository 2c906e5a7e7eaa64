"""Recipes that lack what their algorithm needs are refused."""

import pytest

from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.config.recipe import load_recipe
from mcore_rl.run.inputs import open_policy

DISTILLATION = ["algorithm.advantage=distillation", "teacher.path=/a"]
PAIRS = [
    *("algorithm.advantage=dpo", "algorithm.loss=policy_gradient"),
    "algorithm.aggregation=token_sum",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.advantage=distillation"],
            r"algorithm.advantage=distillation with teacher.path='' .* set teacher.path",
        ),
        (
            ["teacher.path=/a"],
            r"teacher.path=/a with algorithm.advantage=grpo: nothing asks the teacher",
        ),
        (
            ["teacher.path=/a", "algorithm.advantage=distillation", "rollout.temperature=0.7"],
            r"with rollout.temperature=0.7: .* set rollout.temperature=1",
        ),
        (
            [*DISTILLATION, "algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true"],
            r"kl.coef=0.1, kl.in_reward=true and reward_coef=0: nothing reads the reward",
        ),
        (
            [*PAIRS, "algorithm.kl.coef=0.1"],
            r"advantage=dpo with algorithm.kl.coef=0.1, .* sums over all tokens",
        ),
        (
            [*PAIRS, "algorithm.entropy_coef=0.1"],
            r"advantage=dpo with .* algorithm.entropy_coef=0.1: .* sums over all tokens",
        ),
        (
            [*PAIRS, "algorithm.filter_overlong=true"],
            r"advantage=dpo with algorithm.filter_overlong=true: .* its pair's other response",
        ),
        (
            ["rollout.samples_per_prompt=1"],
            r"advantage=grpo with rollout.samples_per_prompt=1: .* would be 0; set rollout",
        ),
        (
            ["train.router_replay=old_pass"],
            r"train.router_replay=old_pass with train.mini_batches=1, train.epochs=1 .* set train",
        ),
        (
            ["algorithm.advantage=gae", "critic.colocated=true", "critic.parallel.tp=4"],
            r"critic.colocated=true with 4 ranks by critic.parallel: there are 2 by parallel",
        ),
        (
            ["cluster.offload=true"],
            r"cluster.offload=true: nobody else is on",
        ),
        (
            ["algorithm.advantage=gpro"],
            r"algorithm.advantage='gpro' \(did you mean 'grpo'\?\)",
        ),
        (["algorithm.loss=gsp"], r"algorithm.loss='gsp' \(did you mean 'gspo'\?\)"),
        (
            ["algorithm.reward_coef=0.5"],
            r"algorithm.reward_coef=0.5 with algorithm.advantage=grpo, which has no use for it: set"
            r" algorithm.advantage=distillation",
        ),
        (
            ["algorithm.dual_clip=3.0", "algorithm.loss=gspo"],
            r"dual_clip=3.0 with algorithm.loss=gspo, which .*: set algorithm.loss=ppo_clip, or",
        ),
        (
            ["algorithm.gamma=0.9"],
            r"set algorithm.advantage=gae or reinforce_plus_plus, or leave algorithm.gamma out",
        ),
        (
            ["algorithm.advantage=optimal_token_baseline", "algorithm.correction.bypass=true"],
            r"algorithm.advantage=optimal_token_baseline with algorithm.correction.bypass=true",
        ),
        (
            ["algorithm.advantage=dpo"],
            r"set algorithm.loss=policy_gradient algorithm.aggregation=token_sum",
        ),
        (
            [
                "algorithm.advantage=dpo",
                "algorithm.loss=policy_gradient",
                "algorithm.aggregation=token_sum",
                "train.mini_batches=2",
            ],
            r"advantage=dpo with train.mini_batches \* train.epochs = 2: .* set both to 1",
        ),
        (
            ["algorithm.preference.loss=ipo", "algorithm.preference.label_smoothing=0.1"],
            r"label_smoothing=0.1 with algorithm.preference.loss=ipo, which has no use for it: "
            r"set algorithm.preference.loss=dpo or simpo",
        ),
        (
            ["algorithm.preference.target_margin=0.5"],
            r"target_margin=0.5 with algorithm.preference.loss=dpo.*loss=simpo",
        ),
        (
            [
                "algorithm.advantage=gae",
                "algorithm.bootstrap_truncated=true",
                "algorithm.filter_overlong=true",
            ],
            r"bootstrap_truncated=true with algorithm.filter_overlong=true: .* set one of",
        ),
        (
            ["algorithm.bootstrap_truncated=true"],
            r"bootstrap_truncated=true with algorithm.advantage=grpo.*set algorithm.advantage=gae",
        ),
        (
            ["algorithm.path=nowhere.py"],
            r"algorithm.path=nowhere.py: no such file in ",
        ),
    ],
)
def test_a_recipe_that_lacks_what_its_algorithm_needs_is_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_algorithm(load_recipe("tiny_moe_grpo", overrides))


@pytest.mark.parametrize(
    ("name", "registered"),
    [
        ("algorithm.advantage", "grpo"),
        ("algorithm.loss", "ppo_clip"),
        ("algorithm.aggregation", "token_mean"),
        ("algorithm.preference.loss", "dpo"),
    ],
)
def test_a_name_that_nobody_registered_is_refused_for_every_command(
    name: str, registered: str
) -> None:
    config = load_recipe("tiny_moe_grpo", [f"{name}=nonsense"])
    with pytest.raises(ValueError, match=f"{name}='nonsense'.*: expected one of .*{registered!r}"):
        open_policy(config.model, config.algorithm, "/never/made", {})
