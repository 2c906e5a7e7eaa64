"""Options of the run: the judge's verdict and the parts of a reward must make sense."""

from typing import Any, cast

import pytest

from mcore_rl.config.run import EvalConfig, EvalSetConfig, JudgeConfig, RewardConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verdict": "(a"}, r"reward.judge.verdict='\(a': missing \)"),
        ({"verdict": "a"}, "reward.judge.verdict='a': has 0 groups, needs one"),
        ({"verdict": "(a)(b)"}, r"has 2 groups, needs one"),
        ({"low": 1.0}, "reward.judge.low=1.0 is not below reward.judge.high=1.0"),
        ({"words": {"yes": 1.0, "perhaps": 2.0}}, "reward.judge.words: perhaps=2.0 lies outside"),
    ],
)
def test_a_judge_that_cannot_answer_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JudgeConfig(**options)


def test_words_may_have_any_value_of_the_judges_range() -> None:
    words = {"bad": -1.0, "good": 3.0}
    assert JudgeConfig(words=words, low=-1.0, high=3.0).words == words


def test_each_part_of_a_reward_has_a_weight() -> None:
    assert RewardConfig(parts=["a", "b"], weights=[1.0, 0.5]).part_weights == {"a": 1.0, "b": 0.5}
    assert RewardConfig().part_weights == {}
    with pytest.raises(ValueError, match=r"reward.parts=\['a'\] and reward.weights=\[\]"):
        RewardConfig(parts=["a"])


def test_a_failed_reward_counts_as_a_value_only_if_it_is_given() -> None:
    assert RewardConfig().on_error == "leave_out"
    assert RewardConfig(on_error="value", error_value=0.0).error_value == 0
    with pytest.raises(ValueError, match=r"^reward.on_error=value without reward.error_value: say"):
        RewardConfig(on_error="value")
    with pytest.raises(ValueError, match=r"^reward.on_error='drop': expected one of 'leave_out'"):
        RewardConfig(on_error=cast(Any, "drop"))
    with pytest.raises(ValueError, match=r"^reward.max_failed_share=1.5: must lie in \[0, 1\]"):
        RewardConfig(max_failed_share=1.5)


def test_an_evaluation_has_at_least_k_samples_for_pass_at_k() -> None:
    numbers = {(0, 1): 0, (0, 8): 8, (1, 1): 1, (8, 8): 8, (32, 8): 32}
    for (samples, pass_k), expected in numbers.items():
        assert EvalConfig(samples=samples, pass_k=pass_k).num_samples == expected
    message = r"^eval.samples=7 is less than eval.pass_k=8: pass@8 takes .*; raise eval.samples"
    with pytest.raises(ValueError, match=message):
        EvalConfig(samples=7, pass_k=8)


def test_sets_of_an_evaluation_have_names_of_their_own() -> None:
    for name, path in (("", "a.jsonl"), ("a/b", "a.jsonl"), ("a", "")):
        with pytest.raises(ValueError, match=rf"name='{name}' and path='{path}'; give both"):
            EvalConfig(sets=[EvalSetConfig(name, path)])
    with pytest.raises(ValueError, match=r"name=preference is taken by dpo.held_out"):
        EvalConfig(sets=[EvalSetConfig("preference", "a.jsonl")])
    twice = [EvalSetConfig("aime", path) for path in ("a.jsonl", "b.jsonl")]
    with pytest.raises(ValueError, match=r"^eval.sets: aime names several entries"):
        EvalConfig(sets=twice)
    assert EvalConfig(data=["c.jsonl"], sets=twice[:1]).files == ["c.jsonl", "a.jsonl"]
