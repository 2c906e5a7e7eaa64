"""Rewards are selected and joined sample by sample."""

from mcore_rl.scores import Scores


def test_scores_are_selected_sample_by_sample() -> None:
    scores = Scores([1.0, 2.0, 3.0], {"form": [0.1, 0.2, 0.3]}, ["", "no", ""])
    picked = scores.select([2, 1])
    assert picked.rewards_N == [3.0, 2.0]
    assert picked.parts == {"form": [0.3, 0.2]} and picked.errors == ["", "no"]
    assert picked.greedy_N == [] and picked.teacher_N == []


def test_joined_scores_fill_missing_parts_and_errors() -> None:
    joined = Scores([1.0], {"a": [0.5]}).joined(Scores([2.0], {"b": [0.25]}, ["no"]))
    assert joined.rewards_N == [1.0, 2.0]
    assert joined.parts == {"a": [0.5, 0.0], "b": [0.0, 0.25]}
    assert joined.errors == ["", "no"]
    assert joined.metrics() == {
        "reward/part/a": 0.25,
        "reward/part/b": 0.125,
        "reward/errors": 1.0,
    }
