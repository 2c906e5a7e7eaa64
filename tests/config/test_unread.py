"""Options that nothing reads in their context are refused if they are set."""

import pytest
import yaml

from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.tree import with_settings

GAE = "algorithm.advantage=gae"
UNCORRECTED = "algorithm.correction.weight=none"
"""A choice by name, which samples of older weights want."""


def make(*settings: str) -> Config:
    pairs = (setting.split("=", 1) for setting in settings)
    config = with_settings(Config(), {name: yaml.safe_load(value) for name, value in pairs})
    check_algorithm(config)
    return config


@pytest.mark.parametrize(
    ("unread", "remedies"),
    [
        ("rollout.oversampling=1.5", ["rollout.dynamic_sampling=true"]),
        ("rollout.max_rounds=4", ["rollout.dynamic_sampling=true"]),
        ("rollout.max_staleness=2", ["rollout.mode=async", UNCORRECTED]),
        ("rollout.partial=wait", ["rollout.mode=async", UNCORRECTED]),
        ("rollout.max_in_flight=64", ["rollout.mode=one_step_off", UNCORRECTED]),
        ("rollout.spill_dir=/tmp", ["rollout.store_gib=1.5"]),
        ("rollout.migration_gap=4", ["rollout.engines=2"]),
        ("reward.overlong_penalty=0.5", ["reward.overlong_buffer_len=8"]),
        ("reward.name=score", ["reward.path=mine.py"]),
        ("reward.error_value=-1.0", ["reward.on_error=value"]),
        ("eval.temperature=0.6", ["eval.samples=4"]),
        ("eval.top_p=0.9", ["eval.pass_k=2"]),
        ("reward.model_tokenizer=/t", ["reward_model.path=/m"]),
        ("reward.judge.max_tokens=8", ["judge.url=http://judge"]),
        ("algorithm.max_ratio=5", ["algorithm.loss=dppo_kl"]),
        ("algorithm.tau_positive=2", ["algorithm.loss=sapo"]),
        ("algorithm.dro_beta=1", ["algorithm.loss=dro"]),
        ("algorithm.vespo.power_negative=1", ["algorithm.loss=vespo"]),
        ("algorithm.covariance.share=0.1", ["algorithm.loss=clip_cov"]),
        ("algorithm.covariance.low=0.5", ["algorithm.loss=clip_cov"]),
        ("algorithm.covariance.kl_coef=2", ["algorithm.loss=kl_cov"]),
        ("algorithm.gae_lambda=0.9", [GAE]),
        ("algorithm.gamma=0.9", [GAE]),
        ("algorithm.bootstrap_truncated=true", [GAE]),
        ("algorithm.gamma=0.9", ["algorithm.advantage=reinforce_plus_plus"]),
        ("algorithm.kl.in_reward=true", ["algorithm.kl.coef=0.1"]),
        ("algorithm.kl.estimator=k1", ["algorithm.kl.coef=0.1"]),
        (
            "algorithm.kl.horizon=10",
            ["algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true", "algorithm.kl.target=0.1"],
        ),
        ("algorithm.correction.high=3", ["algorithm.correction.weight=token"]),
        ("algorithm.correction.bound=mask", ["algorithm.correction.weight=token"]),
        (
            "algorithm.correction.low=0.5",
            ["algorithm.correction.weight=token", "algorithm.correction.bound=mask"],
        ),
        ("algorithm.correction.normalize=true", ["algorithm.correction.weight=token"]),
        ("algorithm.correction.reject_above=0.1", ["algorithm.correction.reject=token"]),
        (
            "algorithm.correction.reject_estimator=k2",
            ["algorithm.correction.reject=token", "algorithm.correction.reject_above=0.1"],
        ),
        (
            "algorithm.correction.reject_below=-0.1",
            [
                "algorithm.correction.reject=token",
                "algorithm.correction.reject_above=0.1",
                "algorithm.correction.reject_estimator=k1",
            ],
        ),
        ("critic.value_clip=0.1", [GAE]),
        ("critic.optimizer.lr=1.0e-4", [GAE]),
        ("critic.parallel.tp=2", [GAE]),
        ("profile.ranks=[0, 0]", ["profile.steps=[2]"]),
        ("profile.tool=nsys", ["profile.steps=[2]"]),
        ("rollout.speculate_tokens=5", ["rollout.speculate=ngram"]),
        ("rollout.speculate_when=always", ["rollout.speculate=ngram"]),
        ("judge.kv_cache_len=1024", ["judge.path=/m"]),
        ("train.optimizer.min_lr=1.0e-7", ["train.optimizer.schedule=linear"]),
        ("dpo.optimizer.min_lr=1.0e-7", ["dpo.optimizer.schedule=cosine"]),
    ],
)
def test_an_option_is_refused_where_nothing_reads_it(unread: str, remedies: list[str]) -> None:
    name = unread.partition("=")[0]
    with pytest.raises(
        ValueError, match=f"^{name}=.* with .*, which has no use for it: set|choose"
    ):
        make(unread)
    assert make(*remedies, unread)


@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.mode=async", UNCORRECTED, "rollout.oversampling=2.0"],
        ["rollout.mode=one_step_off", UNCORRECTED, "rollout.max_staleness=2"],
        ["algorithm.loss=sapo", "algorithm.clip_high=0.3"],
        ["algorithm.loss=kl_cov", "algorithm.covariance.high=9"],
        ["algorithm.loss=clip_cov", "algorithm.covariance.kl_coef=9"],
        ["judge.url=http://judge", "judge.tp=2"],
        ["cluster.address=auto", "cluster.object_store_mib=1024"],
        ["parity_check.sequences=0", "parity_check.tolerance=0.1"],
        ["parity_check.sequences=0", "parity_check.factor=3"],
        ["parity_check.tolerance=0.1", "parity_check.factor=3"],
        ["sync.verify=transfer", "sync.verify_every=5"],
        ["reward.on_error=stop", "reward.max_failed_share=0.5"],
        ["agents.environment=calculator", "eval.max_response_len=64"],
    ],
)
def test_the_last_setting_is_refused_because_of_the_first(settings: list[str]) -> None:
    name = settings[-1].partition("=")[0]
    with pytest.raises(ValueError, match=f"^{name}=.* with {settings[0]}, which has no use for it"):
        make(*settings)


def test_the_error_says_what_to_do() -> None:
    message = (
        r"critic.optimizer.lr=0.0001 with algorithm.advantage=grpo, which has no use for it: set"
        r" algorithm.advantage=gae, or leave critic.optimizer.lr out \(by default it is 1e-05\)"
    )
    with pytest.raises(ValueError, match=message):
        check_algorithm(load_recipe("tiny_moe_grpo", ["critic.optimizer.lr=1.0e-4"]))


def test_a_run_of_episodes_reads_the_share_of_failures_even_if_no_reward_may_fail() -> None:
    settings = ["agents.environment=calculator", "reward.on_error=stop"]
    assert make(*settings, "reward.max_failed_share=0.5").reward.max_failed_share == 0.5


def test_a_default_is_never_refused() -> None:
    assert make("critic.optimizer.lr=1.0e-5", "algorithm.clip_high=0.28", "algorithm.loss=sapo")
