"""Which answers count as right, and the accuracy and pass@k of a policy."""

from typing import Any

import pytest

from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import AlgorithmConfig, EvalConfig, JudgeConfig, RewardConfig
from mcore_rl.loops.evaluation import Correctness, evaluate, pass_metrics
from mcore_rl.scores import Scores
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
    rule = Correctness.of(EvalConfig(**eval_options), RewardConfig(**reward_options))
    assert rule.threshold == pytest.approx(threshold)
    assert rule.part == eval_options.get("correct_part", "")


def test_partial_credit_and_a_form_without_the_answer_are_not_right() -> None:
    rule = Correctness.of(EvalConfig(), RewardConfig(path="reward.py"))
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
    rule = Correctness.of(EvalConfig(), RewardConfig(path="reward.py", **parts))  # type: ignore[arg-type]
    assert rule.are_correct(Scores([0.1 + (0.7 + 0.2), (0.1 + 0.2) + 0.7, 0.99])) == [
        True,
        True,
        False,
    ]


def test_a_failed_reward_is_never_right_whatever_it_counts_as() -> None:
    scores = Scores([1.0, 1.0], errors=["", "ValueError: x"])
    assert Correctness("", 1.0).are_correct(scores) == [True, False]
    assert Correctness("right", 1.0).are_correct(
        Scores([1.0, 1.0], errors=["TypeError: x", "ValueError: x"])
    ) == [False, False]


def test_a_part_that_the_reward_does_not_give_is_named() -> None:
    scores = Scores([1.0], {"right": [1.0], "form": [1.0]})
    message = r"eval.correct_part=rihgt: the reward gives no such number; it gives form, right"
    with pytest.raises(ValueError, match=message):
        Correctness("rihgt", 1.0).are_correct(scores)
    assert Correctness("score", 1.0).are_correct(Scores([1.0])) == [True]


def test_pass_at_k_counts_right_answers_of_each_prompt() -> None:
    right = [True, False, False, False, False, False, True, True, True]
    assert pass_metrics(right, 3) == {
        "eval/pass_at_1": pytest.approx((1 / 3 + 0 + 1) / 3),
        "eval/pass_at_3": pytest.approx(2 / 3),
    }


def test_metrics_of_a_policy_with_samples_and_scores() -> None:
    policy = TablePolicy(make_policy_loss(AlgorithmConfig()))
    policy.served = policy.served + 9.0 * (policy.served.new_ones(5).diag())
    policy.served[4, 4] = -9.0
    metrics, samples, scores = evaluate(
        policy, make_prompts(5), repeats_the_prompt, Correctness("", 1.0), pass_k=2, seed=0
    )
    assert metrics["eval/greedy_accuracy"] == 0.8 and metrics["eval/prompts"] == 5
    assert metrics["eval/greedy_reward"] == pytest.approx(sum(scores.rewards_N) / 5)
    assert metrics["eval/pass_at_1"] == metrics["eval/pass_at_2"] == pytest.approx(0.8)
    assert len(samples) == 5 and metrics["eval/reward_errors"] == 0
    nothing = evaluate(policy, [], repeats_the_prompt, Correctness("", 1.0), pass_k=2, seed=0)
    assert nothing == ({}, [], Scores([]))
