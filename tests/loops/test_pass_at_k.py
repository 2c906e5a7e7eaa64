"""pass@k against the share of all k-subsets that hold a right answer."""

from itertools import combinations

import pytest

from mcore_rl.loops.evaluation import pass_at_k


@pytest.mark.parametrize("num_correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_equals_counting_subsets(num_correct: int, k: int) -> None:
    subsets = list(combinations([True] * num_correct + [False] * (5 - num_correct), k))
    assert pass_at_k(5, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("num_correct", "k"), [(6, 1), (-1, 1), (2, 6), (2, 0)])
def test_refuses_impossible_counts(num_correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of 5 samples, {num_correct} correct"):
        pass_at_k(5, num_correct, k)
