"""Which answers count as right, and the accuracy and pass@k of a policy."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

import pytest

from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import (
    AlgorithmConfig,
    EvalConfig,
    EvalSetConfig,
    JudgeConfig,
    RewardConfig,
)
from mcore_rl.logs.names import find_documented
from mcore_rl.loops.evaluation import Correctness, evaluate, pass_metrics
from mcore_rl.loops.outcomes import RewardFailureError, Rollout
from mcore_rl.types import Sample
from mcore_rl.types.scores import Scores
from tests.support.table_policy import TablePolicy, make_prompts, repeats_the_prompt

FUNCTION = {"path": "reward.py"}
PARTS = {**FUNCTION, "parts": ["right", "form"], "weights": [1.0, 0.2]}
JUDGE = JudgeConfig(high=10.0)


@pytest.mark.parametrize(
    ("eval_options", "reward_options", "threshold"),
    [
        ({}, FUNCTION, 1.0),
        ({}, PARTS, 1.2),
        ({}, {**PARTS, "weights": [2.0, -1.0]}, 2.0),
        ({"correct_part": "right"}, PARTS, 1.0),
        ({"correct_at": 0.5}, FUNCTION, 0.5),
        ({"correct_part": "right", "correct_at": 0.7}, PARTS, 0.7),
        ({}, {"judge": JUDGE}, 10.0),
        ({"correct_part": "judge"}, {**FUNCTION, "judge": JUDGE}, 10.0),
        ({}, {**FUNCTION, "parts": ["score", "judge"], "weights": [1.0, 0.5], "judge": JUDGE}, 6.0),
    ],
)
def test_full_marks_are_needed_unless_the_recipe_says_otherwise(
    eval_options: dict[str, Any], reward_options: dict[str, Any], threshold: float
) -> None:
    rule = Correctness.from_config(EvalConfig(**eval_options), RewardConfig(**reward_options))
    assert rule.threshold == pytest.approx(threshold)
    assert rule.part == eval_options.get("correct_part", "")


def test_partial_credit_and_a_form_without_the_answer_are_not_right() -> None:
    rule = Correctness.from_config(EvalConfig(), RewardConfig(path="reward.py"))
    assert rule.are_correct(Scores([1.0, 0.5, 0.0, -1.0])) == [True, False, False, False]
    parts = {"right": [1.0, 0.0, 1.0], "form": [1.0, 1.0, 0.0]}
    scores = Scores([1.2, 0.2, 1.0], parts)
    assert Correctness("right", 1.0).are_correct(scores) == [True, False, True]
    assert Correctness("", 1.2).are_correct(scores) == [True, False, False]


def test_penalties_do_not_count() -> None:
    scores = Scores([0.25, -0.5], unpenalized_N=[1.0, 0.5])
    assert Correctness("", 1.0).are_correct(scores) == [True, False]


def test_weights_that_sum_up_inexactly_still_give_full_marks() -> None:
    parts = {"parts": ["a", "b", "c"], "weights": [0.1, 0.7, 0.2]}
    rule = Correctness.from_config(EvalConfig(), RewardConfig(path="reward.py", **parts))  # type: ignore[arg-type]
    assert rule.are_correct(Scores([0.1 + (0.7 + 0.2), (0.1 + 0.2) + 0.7, 0.99])) == [
        True,
        True,
        False,
    ]


def test_of_a_failed_reward_nobody_knows_whether_the_answer_is_right() -> None:
    scores = Scores([1.0, 1.0, nan], errors=["", "ValueError: counts as 1", "late"])
    assert Correctness("", 1.0).are_correct(scores) == [True, None, None]
    assert Correctness("right", 1.0).are_correct(
        Scores([1.0, 1.0], errors=["TypeError: x", "ValueError: x"])
    ) == [None, None]
    no_number = Scores([1.0, 1.0], {"right": [1.0, nan]})
    assert Correctness("right", 1.0).are_correct(no_number) == [True, None]


def test_a_part_that_the_reward_does_not_give_is_named() -> None:
    scores = Scores([1.0], {"right": [1.0], "form": [1.0]})
    message = r"eval.correct_part=rihgt: the reward gives no such number; it gives form, right"
    with pytest.raises(ValueError, match=message):
        Correctness("rihgt", 1.0).are_correct(scores)
    assert Correctness("score", 1.0).are_correct(Scores([1.0])) == [True]


def test_pass_at_k_counts_right_answers_of_each_prompt() -> None:
    right = [True, False, False, False, False, False, True, True, True]
    assert pass_metrics(right, 3, 3) == {
        "avg_at_3": pytest.approx((1 / 3 + 0 + 1) / 3),
        "pass_at_1": pytest.approx((1 / 3 + 0 + 1) / 3),
        "prompts_at_1": 3,
        "pass_at_3": pytest.approx(2 / 3),
        "prompts_at_3": 3,
    }


def test_more_samples_than_k_estimate_pass_at_k_without_bias() -> None:
    """One of 4 is right: 2 drawn of them include it in half of all cases; eq. 1."""
    right = [True, False, False, False, True, True, False, False]
    metrics = pass_metrics(right, 4, 2)
    assert metrics["avg_at_4"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert metrics["pass_at_2"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert pass_metrics(right, 4, 1).keys() == {
        "avg_at_4",
        "pass_at_1",
        "prompts_at_1",
    }


def test_failed_samples_are_left_out_of_estimates_and_prompts_with_too_few_others_are_counted() -> (
    None
):
    right = [True, None, None, False, True, False, None, None, None]
    assert pass_metrics(right, 3, 2) == {
        "avg_at_3": pytest.approx((1 + 1 / 3) / 2),
        "pass_at_1": pytest.approx((1 + 1 / 3) / 2),
        "prompts_at_1": 2,
        "pass_at_2": pytest.approx(2 / 3),
        "prompts_at_2": 1,
    }
    assert pass_metrics([None] * 4, 2, 2) == {"prompts_at_1": 0, "prompts_at_2": 0}


REWARDS = RewardConfig(path="unused.py")


def skilled_policy() -> TablePolicy:
    """A policy that repeats every prompt but the one whose token is 4."""
    policy = TablePolicy(make_policy_loss(AlgorithmConfig()))
    policy.served = policy.served + 9.0 * (policy.served.new_ones(5).diag())
    policy.served[4, 4] = -9.0
    return policy


def test_metrics_of_a_policy_with_samples_and_scores() -> None:
    policy = skilled_policy()
    config = EvalConfig(pass_k=2)
    reward = policy.reward_by(repeats_the_prompt)
    metrics, drawn = evaluate(policy, make_prompts(5), reward, config, REWARDS, seed=0)
    assert metrics["eval/greedy_accuracy"] == 0.8 and metrics["eval/prompts"] == 5
    assert metrics["eval/greedy_reward"] == pytest.approx(sum(drawn.scores.rewards_N) / 5)
    assert metrics["eval/pass_at_1"] == metrics["eval/pass_at_2"] == pytest.approx(0.8)
    assert len(drawn.samples) == 5 and metrics["eval/reward_errors"] == 0
    nothing = evaluate(policy, [], reward, config, REWARDS, seed=0)
    assert nothing == ({}, Rollout([], Scores([])))
    policy.calls.clear()
    greedy, _ = evaluate(policy, make_prompts(5), reward, EvalConfig(), REWARDS, seed=0)
    assert policy.calls == ["greedy"] and "eval/pass_at_1" not in greedy
    more = EvalConfig(samples=6, pass_k=2)
    metrics, _ = evaluate(policy, make_prompts(5), reward, more, REWARDS, seed=0)
    assert {"eval/avg_at_6", "eval/pass_at_1", "eval/pass_at_2"} < metrics.keys()
    assert policy.for_eval == [True] * 5, "all are drawn as evaluations want it"


def test_named_sets_have_metrics_of_their_own_beside_those_of_all() -> None:
    """The policy repeats four of five prompts; the last one is in the second set."""
    names = ["", "even", "odd", "even", "odd"]
    prompts = [
        replace(prompt, set_name=name) for prompt, name in zip(make_prompts(5), names, strict=True)
    ]
    policy = skilled_policy()
    reward = policy.reward_by(repeats_the_prompt)
    metrics, _ = evaluate(policy, prompts, reward, EvalConfig(pass_k=2), REWARDS, seed=0)
    assert metrics["eval/prompts"] == 5 and metrics["eval/greedy_accuracy"] == 0.8
    assert metrics["eval/even/prompts"] == metrics["eval/odd/prompts"] == 2
    assert metrics["eval/even/greedy_accuracy"] == metrics["eval/even/pass_at_2"] == 1.0
    assert metrics["eval/odd/greedy_accuracy"] == metrics["eval/odd/pass_at_2"] == 0.5
    assert metrics["eval/odd/avg_at_2"] == 0.5 and metrics["eval/odd/prompts_at_2"] == 2
    assert all(find_documented(name) for name in metrics)
    assert policy.calls == ["greedy", "sample"], "all sets are drawn together"


def test_what_another_model_answers_counts_in_its_own_set_alone() -> None:
    names = ["", "ours", "below", "", "below"]
    prompts = [
        replace(prompt, set_name=name) for prompt, name in zip(make_prompts(5), names, strict=True)
    ]
    sets = [EvalSetConfig("ours", "a.jsonl"), EvalSetConfig("below", "a.jsonl", model="base")]
    policy = skilled_policy()
    reward = policy.reward_by(repeats_the_prompt)
    metrics, _ = evaluate(policy, prompts, reward, EvalConfig(sets=sets), REWARDS, seed=0)
    assert metrics["eval/prompts"] == 3 and metrics["eval/greedy_accuracy"] == 1.0
    assert metrics["eval/below/prompts"] == 2 and metrics["eval/below/greedy_accuracy"] == 0.5
    assert metrics["eval/ours/prompts"] == 1


def test_a_failed_score_is_not_a_wrong_answer_and_is_counted() -> None:
    """4 of 5 greedy answers are right; the scores of a right one and of the wrong one fail."""

    def failing(samples: Sequence[Sample]) -> Scores:
        scores = repeats_the_prompt(samples)
        fails = [sample.prompt.index in (0, 4) for sample in samples]
        rewards = [
            nan if fail else reward for fail, reward in zip(fails, scores.rewards_N, strict=True)
        ]
        return Scores(rewards, errors=["late" * fail for fail in fails])

    def metrics_of(rewards: RewardConfig, num_samples: int = 2) -> dict[str, float]:
        prompts = make_prompts(5)
        config = EvalConfig(samples=num_samples, pass_k=2)
        policy = skilled_policy()
        return evaluate(policy, prompts, policy.reward_by(failing), config, rewards, seed=0)[0]

    metrics = metrics_of(replace(REWARDS, max_failed_share=0.4))
    assert metrics["eval/greedy_accuracy"] == metrics["eval/greedy_reward"] == 1.0
    assert metrics["eval/pass_at_2"] == 1.0 and metrics["eval/prompts_at_2"] == 3
    assert metrics["eval/reward_errors"] == 2 + 4 and metrics["eval/prompts"] == 5
    with pytest.raises(RewardFailureError, match=r"^evaluation: 10 of 25 rewards failed.*'late'"):
        metrics_of(REWARDS, num_samples=4)
    with pytest.raises(RewardFailureError, match=r"^evaluation: reward.on_error=stop, and 2 of 5"):
        metrics_of(replace(REWARDS, on_error="stop"))


def test_an_answer_within_the_bound_of_evaluations_has_no_penalty_for_its_length() -> None:
    """It is longer than a response of training may be, and all the reward function gives is 1."""

    def penalizing(samples: Sequence[Sample]) -> Scores:
        num = len(samples)
        return Scores([0.0] * num, {"overlong_penalty": [-1.0] * num}, unpenalized_N=[1.0] * num)

    policy = skilled_policy()
    metrics, drawn = evaluate(
        policy, make_prompts(5), policy.reward_by(penalizing), EvalConfig(), REWARDS, seed=0
    )
    assert metrics["eval/greedy_reward"] == metrics["eval/greedy_accuracy"] == 1.0
    assert drawn.scores.rewards_N == [1.0] * 5, "samples.jsonl has the same"


def test_without_any_score_there_is_no_accuracy() -> None:
    def failing(samples: Sequence[Sample]) -> Scores:
        return Scores([nan] * len(samples), errors=["late"] * len(samples))

    bears = replace(REWARDS, max_failed_share=1)
    policy = skilled_policy()
    metrics, _ = evaluate(
        policy, make_prompts(5), policy.reward_by(failing), EvalConfig(samples=1), bears, seed=0
    )
    assert metrics == {"eval/prompts": 5, "eval/prompts_at_1": 0, "eval/reward_errors": 10}
