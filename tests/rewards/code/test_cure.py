"""The rewards of programs and unit tests, by hand and by the paper's formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rewards.code.cure import rate_programs, rate_tests, rate_tests_scaled

GROUND_TRUTH = [[True, True], [True, True], [True, False], [False, False]]
"""Programs 0 and 1 are right, 2 and 3 wrong."""
GENERATED = [
    # finds both, finds one, finds none, refuses a right one, refuses it and passes both wrong
    [True, True, True, False, False],
    [True, True, True, True, True],
    [False, True, True, False, True],
    [False, False, True, False, True],
]

matrices = st.integers(1, 5).flatmap(
    lambda num_programs: st.tuples(
        st.lists(
            st.lists(st.booleans(), min_size=2, max_size=2),
            min_size=num_programs,
            max_size=num_programs,
        ),
        st.integers(1, 4).flatmap(
            lambda num_tests: st.lists(
                st.lists(st.booleans(), min_size=num_tests, max_size=num_tests),
                min_size=num_programs,
                max_size=num_programs,
            )
        ),
    )
)


def by_formula(passes_PG: list[list[bool]], passes_PT: list[list[bool]]) -> list[float]:
    """Write the paper's sums and products out, with numbers in place of truth values."""
    is_right = [int(all(row)) for row in passes_PG]
    rewards = []
    for k in range(len(passes_PT[0])):
        product = 1
        for right, row in zip(is_right, passes_PT, strict=True):
            product *= right * int(row[k]) + (1 - right)
        num_wrong = sum(1 - right for right in is_right)
        passing = sum(
            (1 - right) * int(row[k]) for right, row in zip(is_right, passes_PT, strict=True)
        )
        rewards.append(float(-passing + product * num_wrong))
    return rewards


def test_programs_get_their_share_of_the_ground_truth() -> None:
    assert rate_programs(GROUND_TRUTH) == [1.0, 1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="without ground-truth tests"):
        rate_programs([[]])


def test_tests_by_hand() -> None:
    assert rate_tests(GROUND_TRUTH, GENERATED) == [2.0, 1.0, 0.0, 0.0, -2.0]
    assert rate_tests_scaled(GROUND_TRUTH, GENERATED) == [1.0, 0.5, 0.0, 0.0, -1.0]


def test_without_a_right_program_nothing_is_known() -> None:
    assert rate_tests([[False]], [[True, False]]) == [0.0, 0.0]
    assert rate_tests_scaled([[False]], [[True, False]]) == [0.0, 0.0]


def test_without_a_wrong_program_a_right_test_is_one_that_all_pass() -> None:
    assert rate_tests([[True], [True]], [[True, True], [True, False]]) == [0.0, 0.0]
    assert rate_tests_scaled([[True], [True]], [[True, True], [True, False]]) == [1.0, -1.0]


@given(matrices)
def test_the_published_formula(both: tuple[list[list[bool]], list[list[bool]]]) -> None:
    passes_PG, passes_PT = both
    rewards = rate_tests(passes_PG, passes_PT)
    if any(map(all, passes_PG)):
        assert rewards == by_formula(passes_PG, passes_PT)
    scaled = rate_tests_scaled(passes_PG, passes_PT)
    assert all(-1.0 <= reward <= 1.0 for reward in scaled)
