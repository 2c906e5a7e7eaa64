"""Rewards are selected and joined sample by sample; some make no difference to a policy."""

from dataclasses import replace
from math import nan
from time import process_time

import pytest

from mcore_rl.types.scores import Scores, join_scores


def test_scores_are_selected_sample_by_sample() -> None:
    scores = Scores([1.0, 2.0, 3.0], {"form": [0.1, 0.2, 0.3]}, ["", "no", ""])
    picked = scores.select([2, 1])
    assert picked.rewards_N == [3.0, 2.0]
    assert picked.parts == {"form": [0.3, 0.2]} and picked.errors == ["", "no"]
    assert picked.greedy_N == []


def test_joined_scores_fill_missing_parts_and_errors() -> None:
    joined = join_scores([Scores([1.0], {"a": [0.5]}), Scores([2.0], {"b": [0.25]}, ["no"])])
    assert joined.rewards_N == [1.0, 2.0]
    assert joined.parts == {"a": [0.5, 0.0], "b": [0.0, 0.25]}
    assert joined.errors == ["", "no"]
    assert joined.means() == {"reward/part/a": 0.25, "reward/part/b": 0.125}


def test_no_scores_join_to_none_and_penalties_stay_apart() -> None:
    assert join_scores([]) == Scores([])
    joined = join_scores(
        [
            Scores([0.5], greedy_N=[1.0], unpenalized_N=[1.0]),
            Scores([2.0], greedy_N=[3.0]),
        ]
    )
    assert joined.greedy_N == [1.0, 3.0]
    assert joined.unpenalized_N == [1.0, 2.0]


def test_joining_costs_by_part_the_same_however_many_there_are() -> None:
    """CPU time grows with the number of parts; joined two by two, with its square."""
    seconds = []
    for num in (400, 6400):
        parts = [Scores([1.0] * 8, {"form": [0.5] * 8}, [""] * 8)] * num
        runs = []
        for _ in range(5):
            began = process_time()
            join_scores(parts)
            runs.append(process_time() - began)
        seconds.append(min(runs))
    assert seconds[1] < 4 * 16 * seconds[0], seconds


def test_a_sample_without_a_reward_has_no_outcome() -> None:
    scores = Scores([1.0, nan, -2.0], errors=["", "late", "ValueError: counts as -2"])
    assert scores.has_outcome_N == [True, False, True] and scores.outcomes() == [1.0, -2.0]
    joined = join_scores([scores.select([1]), scores.select([0])])
    assert joined.has_outcome_N == [False, True]


def test_without_penalties_a_sample_without_an_outcome_still_has_none() -> None:
    scores = Scores([0.5, nan, -1.0], unpenalized_N=[1.0, 1.0, 0.0]).without_penalties()
    assert scores.has_outcome_N == [True, False, True] and scores.outcomes() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "unpenalized", "differ"),
    [
        ([1.0, 1.0, 1.0, 1.0], [], False),
        ([1.0, 1.0, 1.0, 0.0], [], True),
        ([1.0, 1.0, 1.0, nan], [], False),
        ([1.0, 1.0, 0.0, nan], [], True),
        ([1.0, nan, nan, nan], [], False),
        ([nan, nan, nan, nan], [], False),
        ([1.0, 1.0, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0], False),  # right, but one is too long
        ([0.5, 0.5, 0.5, 0.5], [1.0, 0.5, 0.5, 0.5], True),  # a penalty hides the right one
    ],
)
def test_a_group_differs_in_rewards_before_penalties_of_samples_with_an_outcome(
    rewards: list[float], unpenalized: list[float], differ: bool
) -> None:
    scores = Scores([7.0, *rewards], unpenalized_N=[7.0, *unpenalized] if unpenalized else [])
    assert scores.differ(range(1, 5)) == differ


def test_samples_of_two_roles_are_not_compared() -> None:
    """In CURE, programs that are all right and unit tests that are all wrong give no signal."""
    rewards = [1.0, 0.0, 1.0, 0.0]
    roles = {"is_test": [0.0, 1.0, 0.0, 1.0]}
    assert Scores(rewards, roles).differ(range(4))
    assert not Scores(rewards, roles).differ(range(4), "is_test")
    assert Scores([1.0, 0.0, 0.0, 0.0], roles).differ(range(4), "is_test")


def test_samples_whose_greedy_response_has_no_reward_have_nothing_to_be_compared_with() -> None:
    scores = Scores([1.0, nan, 0.5, 0.0], errors=["", "late", "", ""])
    greedy = Scores([0.25, nan], errors=["", "down"])
    both = scores.with_baselines(greedy)
    assert both.has_outcome_N == [True, False, False, False]
    assert both.errors == ["", "late", *["its greedy response: down"] * 2]
    assert both.greedy_N[:2] == [0.25, 0.25] and both.select([0]).greedy_N == [0.25]
    assert not any(both.is_lost_N)
    lost = replace(scores, is_lost_N=[True, False, False, False])
    lost = lost.with_baselines(replace(greedy, is_lost_N=[False, True]))
    assert lost.is_lost_N == [True, False, True, True] and lost.select([1, 2]).is_lost_N == [0, 1]
    assert join_scores([Scores([1.0]), lost]).is_lost_N == [False, *lost.is_lost_N]
    known = Scores([1.0, 0.0]).with_baselines(Scores([0.5]))
    assert known.rewards_N == [1.0, 0.0] and known.greedy_N == [0.5, 0.5]
