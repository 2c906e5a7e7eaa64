"""Numbers of a forward pass that are not finite are refused, with their place."""

import math

import pytest
import torch

from mcore_rl.train.stats import NotFiniteError, check_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_place(bad: float) -> None:
    good_T = torch.tensor([-1.0, 0.0, -30.0])
    check_finite("values", [good_T, good_T])
    bad_T = torch.tensor([-1.0, bad, bad])
    message = rf"2 of 3 values of micro-batch 1 are not finite, the first at token 1 \({bad}\)"
    with pytest.raises(NotFiniteError, match=message):
        check_finite("values", [good_T, bad_T])
