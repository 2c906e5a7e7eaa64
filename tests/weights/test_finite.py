"""Numbers that are not finite are counted, whatever the dtype."""

from math import inf, nan

import pytest
import torch

from mcore_rl.weights.hf.files import count_not_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0), ([1.0, -2.0], 0), ([nan, 1.0], 1), ([inf, -inf, nan], 3), ([60000.0] * 9, 0)],
)
def test_nan_and_infinite_numbers_are_counted(
    dtype: torch.dtype, values: list[float], expected: int
) -> None:
    assert count_not_finite(torch.tensor(values, dtype=dtype)) == expected


def test_a_sum_that_overflows_is_no_fault_and_whole_numbers_are_finite() -> None:
    assert count_not_finite(torch.full((4,), 3e38)) == 0
    assert count_not_finite(torch.tensor([1, 2])) == 0
