"""Counts numbers of a tensor that are NaN or infinite."""

import torch
from torch import Tensor


def count_not_finite(values: Tensor) -> int:
    """Return how many numbers are not finite; with none, the tensor is read once."""
    if not values.is_floating_point() or values.numel() == 0:
        return 0
    if bool(values.sum(dtype=torch.float32).isfinite()):  # a number that is not stays in the sum
        return 0
    return values.numel() - int(values.isfinite().sum())
