"""Log-probs that are no finite numbers are found."""

import math

import pytest

from mcore_rl.rollout.transport import find_not_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_the_first_that_is_no_number_is_found(bad: float | None) -> None:
    assert find_not_finite([-0.5, 0.0, bad, bad]) == 2
    assert find_not_finite([-0.5, 0.0, -1e30]) is None
    assert find_not_finite([]) is None
