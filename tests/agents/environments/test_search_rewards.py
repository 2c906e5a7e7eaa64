"""Answers are compared as Search-R1 and SQuAD compare them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.environments.search_env import (
    SCORES,
    contains,
    f1,
    find_best_score,
    match_exactly,
    normalize,
    read_truths,
)


@pytest.mark.parametrize(
    ("answer", "truth", "em", "overlap", "inside"),
    [
        ("The Beatles!", "beatles", 1, 1.0, 1),
        ("a  Big-Ben ", "bigben", 1, 1.0, 1),
        ("the city of Paris", "Paris", 0, 0.5, 1),
        ("London", "Paris", 0, 0.0, 0),
        ("", "the", 1, 1.0, 1),
        ("x y y z", "y y", 0, 2 / 3, 1),
        ("Anna", "Ann", 0, 0.0, 1),
    ],
)
def test_scores(answer: str, truth: str, em: float, overlap: float, inside: float) -> None:
    assert match_exactly(answer, truth) == em
    assert f1(answer, truth) == pytest.approx(overlap)
    assert contains(answer, truth) == inside


@given(st.text(), st.text())
def test_scores_are_shares_and_exact_matches_are_whole(answer: str, truth: str) -> None:
    assert normalize(normalize(answer)) == normalize(answer)
    for score in SCORES.values():
        assert 0 <= score(answer, truth) <= 1
        assert score(answer, answer) == 1
    assert f1(answer, truth) == pytest.approx(f1(truth, answer))
    if match_exactly(answer, truth):
        assert f1(answer, truth) == contains(answer, truth) == 1


@pytest.mark.parametrize(
    ("truth", "truths"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ({"target": ["a"]}, ["a"]),
        ({"target": "a"}, ["a"]),
        (1998, ["1998"]),
        (None, []),
        ({}, []),
    ],
)
def test_the_best_of_several_truths_counts(truth: object, truths: list[str]) -> None:
    assert read_truths(truth) == truths
    assert find_best_score("em", "a", truth) == float("a" in truths)
